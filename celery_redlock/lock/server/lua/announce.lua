-- Announce a release: name the first waiters of the waiting set, each on its own channel.
-- A waiter whose channel has no subscriber is dead, and leaves the set; the next one is named.
-- A server that refuses one of these commands refuses a hint, so no error leaves this function.
local NAMED, DEAD = 3, 100

local function announce(waiting, inbox, value)
  local id, rank, dead = string.match(value, '^[^: ]*'), 0, 0
  repeat
    local waiters, missing = redis.pcall('ZRANGE', waiting, rank, NAMED - 1), false
    for _, waiter in ipairs(waiters) do
      local heard = redis.pcall('PUBLISH', inbox .. waiter, rank .. ' ' .. id .. ' ' .. waiting)
      if heard == 0 then
        redis.pcall('ZREM', waiting, waiter)
        dead, missing = dead + 1, true
      elseif type(heard) == 'number' then
        rank = rank + 1
      end
    end
  until not missing or dead > DEAD
end

