-- Grant a lock, or renew it where it is ours already (a request sent twice).
-- KEYS  1 the lock's key   2 the node's run id   3 the node's silence   4 its fencing counter
--       5 the done mark of the run that asks; none where it does not
-- ARGV  1 the value: token:since:label        2 ttl in ms, an integer
--       3 the least fencing token that is wanted, '' for none
--       4 the run id of the server that this connection reached, '' where there is no guard
--       5 ms of silence where the node knows no run id   6 where it knows another one
-- Returns  1                     granted, or already ours; the ttl counts from now
--          {1, token}            the same, with the node's fencing counter, where one is wanted
--          {0, pttl_ms, value}   another's value stands there; pttl -1: it never expires
--          {-1, pttl_ms}         the node lost its memory and does not vote for so long
-- To a run that asks each of these is a list that ends with one number more: the ms since 1970 at
-- which its end was marked, 0 where it was not; {1, token} has a token of 0 where none is wanted.
local current = redis.call('GET', KEYS[1])
if ARGV[4] ~= '' then
  local known = redis.call('GET', KEYS[2])
  if known ~= ARGV[4] then
    local ms = tonumber(known and ARGV[6] or ARGV[5])
    if ms > 0 and ms > redis.call('PTTL', KEYS[3]) then
      redis.call('SET', KEYS[3], '1', 'PX', ms)
    end
    redis.call('SET', KEYS[2], ARGV[4])
  end
end
local done  -- a list ends before a nil, so that who does not ask is not answered
if KEYS[5] then
  done = tonumber(redis.call('GET', KEYS[5]) or 0) or 0
end
if current and current ~= ARGV[1] then
  return {0, redis.call('PTTL', KEYS[1]), current, done}
end
if not current and redis.call('EXISTS', KEYS[3]) == 1 then
  return {-1, redis.call('PTTL', KEYS[3]), done}
end
if ARGV[3] == '' then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return done and {1, 0, done} or 1
end
local token = tonumber(redis.call('GET', KEYS[4]) or '0')
if not token then
  return redis.error_reply('FENCE is not a number')
end
if current then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {1, token, done}
end
token = math.max(token + 1, tonumber(ARGV[3]))
if token > 9007199254740990 then  -- beyond 2^53 a number here stands still
  return redis.error_reply('FENCE exhausted')
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[4], string.format('%.0f', token))
return {1, token, done}
