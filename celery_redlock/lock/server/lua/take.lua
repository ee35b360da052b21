-- Take a start of a rate: the permit that has our token already (a request sent twice), or a free one.
-- If one permit is asked for, the others lose our token.
-- KEYS  1 when each permit was taken   2 the permits' tokens   3 the node's run id
--       4 exists during the node's grace period   5 the node's tenure: since (ms), run id
-- ARGV  1 the token   2 the rate, as "100/h": it begins with the number of permits
--       3 ms for which a start counts
--       4 the permit at which the search for a free one begins
--       5 the only permit that is asked for, '' for any
--       6 '1' if the request may have been executed before
--       7 the run id of the server that this connection reached, '' without a restart guard
--       8 grace period in ms, which begins if the node knows no run id, or another one
-- Returns  {1, permit, view, young}  taken, or already ours; it counts from now
--          {0, ms, view, young}      other clients have what is asked for; ms until the first of these
--                                    permits is free
--          {-1, pttl_ms}             the node lost its data and abstains, but stores the start: that
--                                    can only refuse others. pttl: of its grace period
-- view: a character for each permit, '1' if another client has it, else '0'. young: 1 if the node may
-- have forgotten starts that count, because it has served for a shorter time.
local taken, tokens, token = KEYS[1], KEYS[2], ARGV[1]
local permits, kept = tonumber(string.match(ARGV[2], '^%d+')), tonumber(ARGV[3])
local first, asked = tonumber(ARGV[4]), ARGV[5]
note_server(KEYS[3], KEYS[4], ARGV[7], ARGV[8])
local now = wall()
local own = recorded(KEYS[5])
local young = ARGV[7] ~= '' and (own == '' or now - since(own) < kept) and 1 or 0

-- the clock was set back
for _, permit in ipairs(redis.call('ZRANGEBYSCORE', taken, string.format('(%.0f', now), '+inf')) do
  redis.call('ZADD', taken, now, permit)
end

local ours
if asked ~= '' then
  ours = search(taken, tokens, token, asked) and asked
elseif ARGV[6] == '1' then
  local all = redis.call('HGETALL', tokens)
  for i = 1, #all, 2 do
    ours = all[i + 1] == token and all[i] or ours
  end
end

local all, view, ends = counted(taken, now, kept), {}, nil
for permit = 1, permits do
  view[permit] = '0'
end
for i = 1, #all, 2 do
  local permit = tonumber(all[i])
  if permit < permits and all[i] ~= ours then
    view[permit + 1] = '1'
    if not ends and (asked == '' or asked == all[i]) then
      ends = all[i + 1] + kept - now
    end
  end
end

local chosen = ours or nil
if not chosen and asked ~= '' then
  chosen = view[asked + 1] == '0' and asked
elseif not chosen then
  for step = 0, permits - 1 do
    local permit = (first + step) % permits
    if view[permit + 1] == '0' then
      chosen = string.format('%.0f', permit)
      break
    end
  end
end
view = table.concat(view)
if not chosen then
  return {0, ends or 0, view, young}
end
if ours then
  redis.call('ZADD', taken, now, chosen)
else
  take(taken, tokens, chosen, token, now, kept)
end
redis.call('HSET', tokens, 'rate', ARGV[3] .. ' ' .. ARGV[2])  -- for people
stored(taken, tokens, kept)
if redis.call('EXISTS', KEYS[4]) == 1 then
  return {-1, redis.call('PTTL', KEYS[4])}
end
return {1, tonumber(chosen), view, young}
