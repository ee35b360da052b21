-- Strike out a run that waits no more.
-- KEYS  1 the resource's waiting runs, a hash by task
-- ARGV  1 the task   2 the run
-- Returns  1 where it was entered, else 0
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.match(entry, '^%d+ (.*)$') == ARGV[2] then
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
