-- Move messages that are not acknowledged to the heads of their lists, and claim the worker lease:
-- what is refused is tried again, also of one that has been forgotten.
-- A message is pushed before it is struck out: a server without memory refuses the push, and keeps it.
-- KEYS  1 what is not acknowledged   2 its index   3 the dead worker leases
--       4... the list of each message
-- ARGV  1 the dead worker lease, '' for none   2... a delivery tag and a message, for each of them
-- Returns  {moved, why}  moved: how many; one that is acknowledged, or that another worker has moved,
--                        is not there. why: the error of a push that was refused, '' without one
local moved, why = 0, ''
for i = 2, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    local pushed = redis.pcall('RPUSH', KEYS[3 + i / 2], ARGV[i + 1])
    if type(pushed) == 'number' then
      redis.call('HDEL', KEYS[1], ARGV[i])
      redis.call('ZREM', KEYS[2], ARGV[i])
      moved = moved + 1
    else
      why = pushed.err
    end
  end
end
if ARGV[1] ~= '' then
  local t = redis.call('TIME')
  redis.pcall('ZADD', KEYS[3], string.format('%.0f', t[1] * 1000), ARGV[1])
end
return {moved, why}
