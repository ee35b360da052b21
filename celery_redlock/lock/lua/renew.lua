-- Renew a lock that is ours. Never shortens a ttl that somebody counts on, and creates a key only
-- as a repair, never one that an operator broke.
-- KEYS  1 the lock's key   2 the node's fencing counter, for ARGV 3   3 the note of a break, for 4
-- ARGV  1 the value: token:label   2 ttl in ms, an integer
--       3 the holder's fencing token, which the counter is to have reached, '' for none
--       4 '1': a repair: set the key where none stands
-- Returns  1          ours, and it lives for ttl at least
--          {1, token} the same, with the fencing counter, where ARGV 3 is given
--          0          no key stands there
--          -1         another's value stands there, or an operator broke ours
local current = redis.call('GET', KEYS[1])
if not current then
  if ARGV[4] ~= '1' then
    return 0
  end
  if redis.call('GET', KEYS[3]) == ARGV[1] then
    return -1
  end
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
elseif current ~= ARGV[1] then
  return -1
elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
if ARGV[3] == '' then
  return 1
end
local token = tonumber(redis.call('GET', KEYS[2]) or '0') or 0
if token < tonumber(ARGV[3]) and redis.pcall('SET', KEYS[2], ARGV[3]).ok then
  token = tonumber(ARGV[3])
end
return {1, token}
