-- Delete a lock for an operator, and record the break so that no reclaim sets the key again.
-- KEYS  1 the lock's key   2 the record of the break of this value
--       3 the set of the resource's waiters
-- ARGV  1 the value to delete: token:since:label   2 ttl of the record in ms, an integer
--       3 the beginning of the waiters' own channels
-- Returns  1  deleted
--          0  the key has another value or is missing, and stays so; the record is written anyway
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
announce(KEYS[3], ARGV[3], ARGV[1])
return 1
