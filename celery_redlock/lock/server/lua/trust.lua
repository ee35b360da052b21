-- Let the node vote at once: an operator confirms that it has forgotten no lock.
-- KEYS  1 the node's run id   2 exists during the node's grace period
--       3 the node's tenure: since (ms), run id
-- ARGV  1 the run id of the server that this connection reached
-- Returns  1 if the node was in its grace period, else 0
local before, time = redis.call('GET', KEYS[3]) or '', redis.call('TIME')
local since = tonumber(string.match(before, '^%d+') or 0) + 1
since = math.max(since, time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[3], string.format('%.0f %s', since, ARGV[1]))
return redis.call('DEL', KEYS[2])
