-- Delete a lock if the key has our value, and announce that. Of a lock with several permits, delete
-- each one with our value. Before that, write the completion marker of its run.
-- KEYS  1 the lock's key, that of permit 0   2 the set of the resource's waiters
--       3 the run's completion marker; absent if the run has not ended
-- ARGV  1 the value: token:since:label   2 the beginning of the waiters' own channels, '' to announce
--       nothing   3 the limit: the number of permits
--       4 the marker: ms from the end of the run to the end of the marker   5 ms to that end now
-- Returns  1  deleted, even if the server refuses to publish
--          0  no key has our value, and all stay unchanged; the marker is written anyway
if KEYS[3] then
  redis.pcall('SET', KEYS[3], ARGV[4], 'PX', ARGV[5])  -- a full memory must not block the release
end
local deleted = 0
if ARGV[3] == '1' then
  deleted = redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0
else
  local names = permits(KEYS[1], ARGV[3])
  for i, value in ipairs(redis.call('MGET', unpack(names))) do
    if value == ARGV[1] then
      deleted = redis.call('DEL', names[i])
    end
  end
end
if deleted == 1 and ARGV[2] ~= '' then
  announce(KEYS[2], ARGV[2], ARGV[1])
end
return deleted
