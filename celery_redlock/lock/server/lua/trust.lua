-- Let the node vote at once: an operator confirms that it has forgotten no lock. Forget the records
-- of tenures that begin later than now: another program has written them.
-- KEYS  1 the node's run id   2 exists during the node's grace period
--       3 the node's tenure: since (ms), run id
--       4...: its records of the tenures at other nodes' addresses
-- ARGV  1 the run id of the server that this connection reached
-- Returns  1 if the node was in its grace period, else 0
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local begun = math.max(since(recorded(KEYS[3])) + 1, now)
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[3], string.format('%.0f %s', begun, ARGV[1]))
for i = 4, #KEYS do
  local note = recorded(KEYS[i])
  if note == '' or since(note) > now then
    redis.call('DEL', KEYS[i])
  end
end
return redis.call('DEL', KEYS[2])
