-- Give back a start whose body has not begun, or all starts for an operator, and announce that.
-- KEYS  1 when each permit was taken   2 the permits' tokens   3 the set of those that wait for a start
-- ARGV  1 the token, '' for all starts   2 the permit that it probably has here; of all starts any text
--       that tells this announcement from others, the same for every node
--       3 the beginning of the waiters' own channels   4 ms for which a start counts
-- Returns  how many starts that count were given back
local counted, now = 0, wall()
local function give_back(permit)
  local at = redis.call('ZSCORE', KEYS[1], permit)
  if at and now - at < tonumber(ARGV[4]) then
    counted = counted + 1
  end
  forget(KEYS[1], KEYS[2], permit)
end

if ARGV[1] ~= '' and redis.call('HGET', KEYS[2], ARGV[2]) == ARGV[1] then
  give_back(ARGV[2])
else  -- the node may have granted another permit
  local all = redis.call('HGETALL', KEYS[2])
  for i = 1, #all, 2 do
    if all[i + 1] == ARGV[1] or (ARGV[1] == '' and tonumber(all[i])) then
      give_back(all[i])
    end
  end
end
if counted > 0 then
  announce(KEYS[3], ARGV[3], ARGV[1] ~= '' and ARGV[1] or ARGV[2])
end
return counted
