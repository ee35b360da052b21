-- Delete a lock if the key has our value, and announce that. Before that, write the completion
-- marker of its run.
-- KEYS  1 the lock's key   2 the set of the resource's waiters
--       3 the run's completion marker; absent if the run has not ended
-- ARGV  1 the value: token:since:label   2 the beginning of the waiters' own channels, '' to announce
--       nothing
--       3 the marker: ms from the end of the run to the end of the marker   4 ms to that end now
-- Returns  1  deleted, even if the server refuses to publish
--          0  the key does not have our value and stays unchanged; the marker is written anyway
if KEYS[3] then
  redis.pcall('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])  -- a full memory must not block the release
end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
if ARGV[2] ~= '' then
  announce(KEYS[2], ARGV[2], ARGV[1])
end
return 1
