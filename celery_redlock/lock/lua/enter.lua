-- Enter a run as the one of its task that waits for a resource, where none does yet.
-- KEYS  1 the resource's waiting runs, a hash by task
-- ARGV  1 the task   2 the run   3 ms after which it counts no more, an integer
-- Returns  ''        it is entered, or was already, and stays for so long from now on
--          the run   another one's, which is there and stays
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry then
  local ends, run = string.match(entry, '^(%d+) (.*)$')
  if run and run ~= ARGV[2] and tonumber(ends) > now then
    return run
  end
end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now + ARGV[3], ARGV[2]))
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return ''
