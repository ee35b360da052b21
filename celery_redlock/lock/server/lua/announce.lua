-- Announce a release: name the first waiters of the waiting set, each on its own channel.
-- A waiter whose channel has no subscriber is dead, and leaves the set; the next one is named.
-- Subscribers of the common channel that no set lists are clients of an earlier version. They get
-- the message on that channel, and so does everybody if no waiter is named.
-- Valkey 9.1 counts the subscribers of a channel wrongly while it resizes their table: with 8, 15, 16,
-- 29 to 32, 57 to 64 of them, and so on. Then nobody else gets the message: if each release woke all
-- waiters, its cost would grow with them, and clients of an earlier version try again by themselves.
-- A server that refuses one of these commands refuses a hint, so no error leaves this function.
local NAMED, DEAD = 3, 100
local MOST_SUBSCRIBERS = 100000  -- a larger count is wrong

-- Return whether to send the message on the common channel, too, for clients of an earlier version.
local function tells_all(waiting, channel)
  local counts = redis.pcall('PUBSUB', 'NUMSUB', channel, waiting)
  if not counts[4] then
    return true
  end
  local all, nameable = tonumber(counts[2]), tonumber(counts[4])
  return all > nameable and all <= MOST_SUBSCRIBERS
end

local function announce(waiting, channel, inbox, value)
  local id, rank, dead = string.match(value, '^[^: ]*'), 0, 0
  repeat
    local waiters, missing = redis.pcall('ZRANGE', waiting, rank, NAMED - 1), false
    for _, waiter in ipairs(waiters) do
      local heard = redis.pcall('PUBLISH', inbox .. waiter, rank .. ' ' .. id .. ' ' .. channel)
      if heard == 0 then
        redis.pcall('ZREM', waiting, waiter)
        dead, missing = dead + 1, true
      elseif type(heard) == 'number' then
        rank = rank + 1
      end
    end
  until not missing or dead > DEAD
  if rank == 0 then
    redis.pcall('PUBLISH', channel, value)
    return
  end
  if tells_all(waiting, channel) then
    redis.pcall('PUBLISH', channel, value .. ' named')
  end
end

