-- Grant one permit of a lock: the one that has our value already (a request sent twice), or a free
-- one. The other permits lose our value, so it has at most one of them.
-- KEYS  1 the key of permit 0, from which the others have their names   2 the node's run id
--       3 exists during the node's grace period
--       4 the run's completion marker; absent if it is not read
-- ARGV  1 the value: token:since:label        2 ttl in ms, an integer
--       3 the limit: the number of permits    4 the permit at which the search for a free one begins
--       5 the only permit that is asked for, '' for any
--       6 the run id of the server that this connection reached, '' without a restart guard
--       7 grace period in ms, which begins if the node knows no run id, or another one
-- Returns  {1, permit, view}     granted, or already ours; the ttl counts from now
--          {0, pttl_ms, value, ms, view}  other clients have what is asked for; of these the lease that
--                                ends first: pttl -1: never; the ms since 1970 by the node's clock
--          {-1, pttl_ms}         the node lost its data and abstains; pttl: of its grace period
-- view: a character for each permit, '1' if another client has it, else '0'. With KEYS[4], each reply
-- has one more number at its end: as of lua/marker.lua.
local names, value = permits(KEYS[1], ARGV[3]), ARGV[1]
local asked = tonumber(ARGV[5])
note_server(KEYS[2], KEYS[3], ARGV[6], ARGV[7])
local done = KEYS[4] and ended_for(KEYS[4]) or nil  -- a Lua list ends before a nil

local values, view, ours = redis.call('MGET', unpack(names)), {}, nil
for i, current in ipairs(values) do
  view[i] = current and current ~= value and '1' or '0'
  if current == value then
    if not ours and (not asked or asked == i - 1) then
      ours = i - 1
    else
      redis.call('DEL', names[i])
    end
  end
end
view = table.concat(view)
if ours then
  redis.call('PEXPIRE', names[ours + 1], ARGV[2])
  return {1, ours, view, done}
end

local first, last = asked or 0, asked or #names - 1
local free
if asked then
  free = string.sub(view, asked + 1, asked + 1) == '0' and asked or nil
else
  free = string.find(view, '0', tonumber(ARGV[4]) + 1, true) or string.find(view, '0', 1, true)
  free = free and free - 1
end
if not free then
  local soonest, ends = first, math.huge
  for permit = first, last do
    local ms = redis.call('PTTL', names[permit + 1])
    if ms >= 0 and ms < ends then
      soonest, ends = permit, ms
    end
  end
  return {0, ends < math.huge and ends or -1, values[soonest + 1], wall(), view, done}
end
if redis.call('EXISTS', KEYS[3]) == 1 then
  return {-1, redis.call('PTTL', KEYS[3]), done}
end
if redis.call('EXISTS', names[free + 1]) == 1 then  -- another program has written another type
  return redis.error_reply('WRONGTYPE a permit has another type')
end
redis.call('SET', names[free + 1], value, 'PX', ARGV[2])
return {1, free, view, done}
