-- Renew each lock whose key has our value. Never shortens a ttl, because a client may rely on it.
-- Creates a key only for a reclaim, and never after an operator broke the lock.
-- KEYS  the key of each lock; then the node's fencing counter; then, only for a reclaim of a single
--       lock, the record of its break
-- ARGV  three for each lock: the value (token:since:label); the ttl in ms, an integer; the holder's
--       fencing token, to which the counter is raised, '' for none
-- Returns a list with one item for each lock
--          1          renewed: the key lives for at least the ttl
--          {1, token} the same, with the fencing counter, if a token was given; token 0 if another
--                     program has written what is no number, which then stays
--          0          the key is missing
--          -1         the key has another client's value, or an operator broke the lock
local count = #ARGV / 3
local counter, broken = KEYS[count + 1], count == 1 and KEYS[3]

local function standing(key)
  local value = redis.pcall('GET', key)
  if type(value) ~= 'table' then
    return value
  elseif string.find(value.err, 'WRONGTYPE') then  -- another program's key must not fail the rest
    return ''
  end
  return redis.call('GET', key)
end

local function renewed(key, value, ttl, least)
  local current = standing(key)
  if not current then
    if not broken then
      return 0
    end
    if redis.call('GET', broken) == value then
      return -1
    end
    redis.call('SET', key, value, 'PX', ttl)
  elseif current ~= value then
    return -1
  elseif redis.call('PTTL', key) < tonumber(ttl) then
    redis.call('PEXPIRE', key, ttl)
  end
  if least == '' then
    return 1
  end
  local reached = standing(counter)
  if reached == '' then
    return {1, 0}
  end
  local token = tonumber(reached or '0')
  if not token or token ~= token then
    return {1, 0}
  end
  if token < tonumber(least) and redis.pcall('SET', counter, least).ok then
    token = tonumber(least)
  end
  return {1, token}
end

local words = {}
for i = 1, count do
  words[i] = renewed(KEYS[i], ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i])
end
return words
