-- Delete a lock that is ours, and say that it is free; before that, mark its run as done.
-- KEYS  1 the lock's key   2 the run's done mark; none where the run is not at its end
-- ARGV  1 the value: token:since:label   2 the channel of its waiters, '' to say nothing
--       3 the mark: ms since 1970   4 the ms for which it stays
-- Returns  1  deleted, also where the server refuses to publish
--          0  it was not ours (any more), and stays as it is; the mark is made all the same
if KEYS[2] then
  redis.pcall('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])  -- a full memory must not keep the lock
end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
if ARGV[2] ~= '' then
  redis.pcall('PUBLISH', ARGV[2], ARGV[1])
end
return 1
