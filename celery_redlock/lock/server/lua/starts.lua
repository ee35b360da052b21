-- The starts of a rate, in four scripts: permits with the ms at which they were taken, in a sorted
-- set, and whose they are, in a hash. A permit is free again once that is long enough ago. The field
-- "rate" of the hash is no permit: for people, the ms for which a start counts, a space, the rate.
local function stored(taken, tokens, kept)
  for _, key in ipairs({taken, tokens}) do
    redis.call('PEXPIRE', key, math.max(tonumber(kept), redis.call('PTTL', key)))
  end
end

-- The permits that count, and the ms at which each was taken, by turns; the one that is free first is
-- the first.
local function counted(taken, now, kept)
  local after = string.format('(%.0f', now - kept)
  return redis.call('ZRANGEBYSCORE', taken, after, '+inf', 'WITHSCORES')
end

-- Take a permit. If clients with a longer period still count its last start, that is kept beside it.
local function take(taken, tokens, permit, token, now, kept)
  local at, before = redis.call('ZSCORE', taken, permit), 'before:' .. permit
  if at and redis.call('PTTL', taken) > tonumber(kept) then
    redis.call('HSET', tokens, before, at .. ' ' .. (redis.call('HGET', tokens, permit) or ''))
  else
    redis.call('HDEL', tokens, before)
  end
  redis.call('ZADD', taken, now, permit)
  redis.call('HSET', tokens, permit, token)
end

-- Let a permit have the start that it had before it was taken, if there is one.
local function forget(taken, tokens, permit)
  local before = redis.call('HGET', tokens, 'before:' .. permit)
  redis.call('HDEL', tokens, permit, 'before:' .. permit)
  redis.call('ZREM', taken, permit)
  if before then
    local at, token = string.match(before, '^(%S+) (.*)$')
    redis.call('ZADD', taken, at, permit)
    redis.call('HSET', tokens, permit, token)
  end
end

-- Forget the permits that have a token, but for one; return whether that one has it.
local function search(taken, tokens, token, but)
  local found, all = false, redis.call('HGETALL', tokens)
  for i = 1, #all, 2 do
    if all[i + 1] == token and all[i] == but then
      found = true
    elseif all[i + 1] == token then
      forget(taken, tokens, all[i])
    end
  end
  return found
end
