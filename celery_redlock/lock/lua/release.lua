-- Delete a lock that is ours, and say that it is free.
-- KEYS  1 the lock's key
-- ARGV  1 the value: token:label   2 the channel of its waiters, '' to say nothing
-- Returns  1  deleted, also where the server refuses to publish
--          0  it was not ours (any more), and stays as it is
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
if ARGV[2] ~= '' then
  redis.pcall('PUBLISH', ARGV[2], '')
end
return 1
