-- Say that a worker lives, and return the worker leases that others may have left.
-- KEYS  1 the worker leases: when each beat last, in ms of this server's clock
--       2 the dead ones: when a worker last said that it moves the messages of each
--       3 the names of their workers
-- ARGV  1 the worker lease   2 the name of its worker if it joins, '' else
--       3 ms without a beat after which a worker lease is quiet
--       4 ms after which another worker goes on with the messages of a dead one, '' if the caller
--         moves none
-- Returns  {0}                                     it is dead
--          {1, dead, lease, beat, lease, beat...}  dead: one that the caller is to move, or ''; then
--                                                  those that are quiet, or ahead of a clock that
--                                                  was set back
-- a script that has written is not refused for want of memory, and a beat takes none: those that are
-- acknowledged free some (source: redis/src/script.c, scriptVerifyOOM)
redis.call('ZREM', KEYS[1], '')
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
elseif not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return {0}
end
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
local reply = {1, ''}
for _, span in ipairs({{'-inf', now - ARGV[3]}, {now + ARGV[3], '+inf'}}) do
  local quiet = redis.call('ZRANGEBYSCORE', KEYS[1], span[1], span[2], 'WITHSCORES', 'LIMIT', 0, 500)
  for _, text in ipairs(quiet) do
    reply[#reply + 1] = text
  end
end
if ARGV[4] == '' then
  return reply
end
local dead = redis.call('ZRANGE', KEYS[2], 0, 15, 'WITHSCORES')
for i = 1, #dead, 2 do
  if math.abs(now - dead[i + 1]) > tonumber(ARGV[4]) then
    redis.call('ZADD', KEYS[2], string.format('%.0f', now), dead[i])
    reply[2] = dead[i]
    break
  end
end
return reply
