-- Note which run of the server this is, and be silent where the one before it may have known more.
-- KEYS  1 the node's run id   2 the node's silence
-- ARGV  1 the run id of the server that this connection reached
--       2 ms of silence where the node knows no run id   3 where it knows another one
-- Returns  ms for which the node does not vote, 0 where it does
local known = redis.call('GET', KEYS[1])
if known ~= ARGV[1] then
  local ms = tonumber(known and ARGV[3] or ARGV[2])
  if ms > 0 and ms > redis.call('PTTL', KEYS[2]) then
    redis.call('SET', KEYS[2], '1', 'PX', ms)
  end
  redis.call('SET', KEYS[1], ARGV[1])
end
return math.max(0, redis.call('PTTL', KEYS[2]))
