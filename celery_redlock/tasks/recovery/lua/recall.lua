-- Put forgotten worker leases among the dead ones again, where messages were noted under them late.
-- KEYS  1 the worker leases   2 the dead ones
-- ARGV  1 '1' to put them there, '0' to ask only   2... worker leases
-- Returns  those of them that are in neither
local forgotten = {}
for i = 2, #ARGV do
  if not (redis.call('ZSCORE', KEYS[1], ARGV[i]) or redis.call('ZSCORE', KEYS[2], ARGV[i])) then
    if ARGV[1] == '1' then
      redis.call('ZADD', KEYS[2], '0', ARGV[i])
    end
    forgotten[#forgotten + 1] = ARGV[i]
  end
end
return forgotten
