-- Store a start of a body that has begun, on a node that did not grant it, whoever has its permit
-- there: the node can then refuse others, also if those that granted it forget it.
-- KEYS  1 when each permit was taken   2 the permits' tokens
-- ARGV  1 the token   2 its permit   3 ms for which a start counts   4 ms since the body began
-- Returns  1
search(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
local at = wall() - tonumber(ARGV[4])
local known = redis.call('ZSCORE', KEYS[1], ARGV[2])
-- never earlier: a delayed one must not free the start of a later body
redis.call('ZADD', KEYS[1], math.max(at, tonumber(known or at)), ARGV[2])
redis.call('HSET', KEYS[2], ARGV[2], ARGV[1])
stored(KEYS[1], KEYS[2], ARGV[3])
return 1
