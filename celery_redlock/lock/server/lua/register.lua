-- Register a process that waits for a resource, or for a start of its rate; if it asks, return its
-- place and when a permit is free for it.
-- KEYS  1 the set of the waiters   2 the lock's key, that of permit 0; or when each permit of the rate
--       was taken; absent if it does not ask
-- ARGV  1 the waiter   2 since when its first caller or message waits: s since 1970
--       3 ms after which the set expires, unless somebody registers
--       4 how many waiters before this one have had their turn: they leave the set if a permit is
--       free   5 the beginning of the waiters' own channels: a waiter before this one whose channel
--       has no subscriber is dead, and leaves the set if a permit is free
--       6 the limit: the number of permits   7 ms for which a start counts, '' for a lock
-- Returns  {rank, free, ms}  rank: how many waiters are before this one, -1 if the server refuses to
--                            register it: its user lacks a right, or memory is full
--                            free: how many permits are free now
--                            ms: until the one with this rank is free: 0 now, -1 if that does not
--                            expire. Of a lock at most until the last one is; of a rate each permit
--                            is taken again as soon as it is free
--          0                 it does not ask
local is_registered = type(redis.pcall('ZADD', KEYS[1], ARGV[2], ARGV[1])) == 'number'
if is_registered then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
if #KEYS == 1 then
  return 0
end
local ends, free, lasting, kept = {}, 0, math.huge, tonumber(ARGV[7])
if not kept then
  local names, left = permits(KEYS[2], ARGV[6]), {}
  for i, name in ipairs(names) do
    local ms = redis.call('PTTL', name)
    left[i] = ms < 0 and lasting or math.max(ms, 1)
    if ms == -2 then
      free = free + 1
    else
      ends[#ends + 1] = left[i]
    end
  end
  -- a hold refuses all but holds, which are registered since 0: see lua/permit.lua
  if free > 0 and #names > 1 and tonumber(ARGV[2]) > 0 then
    for i, value in ipairs(redis.call('MGET', unpack(names))) do
      if value and string.byte(value) == string.byte('!') then
        free, ends = 0, {left[i]}
      end
    end
  end
else
  local limit, now = tonumber(ARGV[6]), wall()
  local all = counted(KEYS[2], now, kept)
  for i = 1, #all, 2 do
    if tonumber(all[i]) < limit then
      ends[#ends + 1] = math.min(all[i + 1] + kept - now, kept)
    end
  end
  free = limit - #ends
end

-- ms until the permit is free that those before leave to a waiter
local function free_in(rank)
  if rank < free or #ends == 0 then
    return 0
  end
  table.sort(ends)
  if kept then
    local turn, permits = rank % (free + #ends), free + #ends
    return (turn < free and 0 or ends[turn - free + 1]) + math.floor(rank / permits) * kept
  end
  local ms = ends[math.min(rank - free + 1, #ends)]
  return ms == lasting and -1 or ms
end

local rank = is_registered and redis.pcall('ZRANK', KEYS[1], ARGV[1])
if type(rank) ~= 'number' then
  return {-1, free, free_in(0)}
end
if free == 0 or rank == 0 then
  return {rank, free, free_in(rank)}
end
local passed, channels = tonumber(ARGV[4]), {}
local before = redis.pcall('ZRANGE', KEYS[1], 0, math.min(rank, 100) - 1)
for place, waiter in ipairs(before) do
  channels[place] = ARGV[5] .. waiter
end
local counts = redis.pcall('PUBSUB', 'NUMSUB', unpack(channels))  -- name, count, name, count...
for place, waiter in ipairs(before) do
  if place <= passed or tonumber(counts[2 * place]) == 0 then
    redis.pcall('ZREM', KEYS[1], waiter)
    rank = rank - 1
  end
end
return {rank, free, free_in(rank)}
