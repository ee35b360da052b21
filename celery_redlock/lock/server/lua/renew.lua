-- Renew locks that are ours, each by itself. Never shortens a ttl that somebody counts on, and
-- creates a key only as a repair, never one that an operator broke.
-- KEYS  of each lock its key; behind them the node's fencing counter; behind that, where it is a
--       repair of one lock, the note of its break
-- ARGV  of each lock three: the value (token:since:label); the ttl in ms, an integer; the holder's
--       fencing token, which the counter is to have reached, '' for none
-- Returns a list, of each lock
--          1          ours, and it lives for ttl at least
--          {1, token} the same, with the fencing counter, where a token is given; 0 where that is
--                     no text, which no program of ours has written, and so stays
--          0          no key stands there
--          -1         another's value stands there, or an operator broke ours
local count = #ARGV / 3
local counter, broken = KEYS[count + 1], count == 1 and KEYS[3]

local function standing(key)
  local value = redis.pcall('GET', key)
  if type(value) ~= 'table' then
    return value
  elseif string.find(value.err, 'WRONGTYPE') then  -- somebody's, and no reason to fail the rest
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
  local token = tonumber(reached or '0') or 0
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
