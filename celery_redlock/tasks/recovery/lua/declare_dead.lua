-- Declare a worker lease dead, unless it has beaten since it was looked at.
-- KEYS  1 the worker leases   2 the dead ones
-- ARGV  1 the worker lease   2 the beat that was seen, '' for any   3 '1' if the caller moves its
--       messages, '0' if any worker may
-- Returns  1 it is dead now   0 it has beaten, or was dead before
local beat = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not beat or (ARGV[2] ~= '' and beat ~= ARGV[2]) then
  return 0
end
local t = redis.call('TIME')
redis.call('ZADD', KEYS[2], string.format('%.0f', t[1] * 1000 * ARGV[3]), ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
return 1
