-- Grant one permit of a lock: the one that has our value already (a request sent twice), or a free
-- one. If one permit is asked for, the others lose our value. A request for any deletes nothing: it
-- may be late, and what it would delete may be the permit that we hold by now. While another client
-- has a permit as an operator's hold, whose value begins with "!", nobody else gets one.
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
-- view: a character for each permit, '0' if no other client has it, else the first one of its token,
-- '1' for '0': nodes on which rivals share a permit differ in it. With KEYS[4], each reply has one more
-- number at its end: as of lua/marker.lua.
local names, value = permits(KEYS[1], ARGV[3]), ARGV[1]
local asked = tonumber(ARGV[5])
note_server(KEYS[2], KEYS[3], ARGV[6], ARGV[7])
local done = KEYS[4] and ended_for(KEYS[4]) or nil  -- a Lua list ends before a nil

local values, view, ours, hold = redis.call('MGET', unpack(names)), {}, nil, nil
local mark = string.byte('!')
local yields = string.byte(value) ~= mark  -- a hold takes its permits beside other holds
for i, current in ipairs(values) do
  view[i] = '0'
  if current and current ~= value then
    view[i] = string.match(current, '^!?([1-9a-z])') or '1'
  end
  if yields and current and string.byte(current) == mark then
    hold = hold or i - 1
  end
  if current == value and (not asked or asked == i - 1) then
    ours = ours or i - 1
  elseif current == value then
    redis.call('DEL', names[i])
  end
end
if ours then
  redis.call('PEXPIRE', names[ours + 1], ARGV[2])
  return {1, ours, table.concat(view), done}
end

local first, last = asked or 0, asked or #names - 1
if hold then
  first, last, view = hold, hold, {string.rep('1', #names)}
end
local free
for step = 0, last - first do
  local permit = asked or (ARGV[4] + step) % #names
  if view[permit + 1] == '0' then
    if redis.call('EXISTS', names[permit + 1]) == 0 then
      free = permit
      break
    end
    view[permit + 1] = '1'  -- another program has written another type
  end
end
view = table.concat(view)
if not free then
  local soonest, ends = first, math.huge
  for permit = first, last do
    local ms = redis.call('PTTL', names[permit + 1])
    if ms >= 0 and ms < ends then
      soonest, ends = permit, ms
    end
  end
  local holder = values[soonest + 1] or ''
  return {0, ends < math.huge and ends or -1, holder, wall(), view, done}
end
if redis.call('EXISTS', KEYS[3]) == 1 then
  return {-1, redis.call('PTTL', KEYS[3]), done}
end
redis.call('SET', names[free + 1], value, 'PX', ARGV[2])
return {1, free, view, done}
