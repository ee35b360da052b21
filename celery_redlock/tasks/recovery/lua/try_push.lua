-- Try whether a script may push to a list, and leave nothing behind.
-- KEYS  1 a key that nobody has
-- Returns  an error: WRONGTYPE if it may, that of the missing right else
redis.call('ZREM', KEYS[1], 'x')
redis.call('ZADD', KEYS[1], '0', 'x')
local reply = redis.pcall('RPUSH', KEYS[1], 'x')
redis.call('ZREM', KEYS[1], 'x')
return reply
