-- Grant a lock, or renew it if the key already has our value (a request sent twice).
-- KEYS  1 the lock's key   2 the node's run id   3 exists during the node's grace period
--       4 the node's fencing counter   5 the run's completion marker; absent if it is not read
-- ARGV  1 the value: token:since:label        2 ttl in ms, an integer
--       3 the least fencing token that is accepted, '' without fencing
--       4 the run id of the server that this connection reached, '' without a restart guard
--       5 grace period in ms, which begins if the node knows no run id, or another one
-- Returns  1                     granted, or already ours; the ttl counts from now
--          {1, token}            the same with fencing: the node's fencing counter
--          {0, pttl_ms, value, ms}  the key has another client's value; pttl -1: it never expires;
--                                the ms since 1970 by the node's clock
--          {-1, pttl_ms}         the node lost its data and abstains; pttl: of its grace period
-- With KEYS[5], each reply is a list with one more number at its end: as of lua/marker.lua. Then
-- {1, token} has the token 0 without fencing.
note_server(KEYS[2], KEYS[3], ARGV[4], ARGV[5])
local done = KEYS[5] and ended_for(KEYS[5]) or nil  -- a Lua list ends before a nil
-- mostly neither is there, which one command tells
local standing = redis.call('EXISTS', KEYS[1], KEYS[3]) > 0
local current = standing and redis.call('GET', KEYS[1])
if current and current ~= ARGV[1] then
  return {0, redis.call('PTTL', KEYS[1]), current, wall(), done}
end
if standing and not current then
  return {-1, redis.call('PTTL', KEYS[3]), done}
end
if ARGV[3] == '' then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return done and {1, 0, done} or 1
end
local counter = redis.pcall('GET', KEYS[4])  -- an error if another program has written another type
local token = type(counter) ~= 'table' and tonumber(counter or '0')
if not token or token ~= token then  -- Lua reads 'nan' as a number
  return redis.error_reply('FENCE is not a number')
end
if current then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {1, token, done}
end
token = math.max(token + 1, tonumber(ARGV[3]))
if token > 9007199254740990 then  -- beyond 2^53, adding 1 to a Lua number changes nothing
  return redis.error_reply('FENCE exhausted')
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[4], string.format('%.0f', token))
return {1, token, done}
