-- Compare and set the claim of a unique send.
-- KEYS  1 the key of the unique send
-- ARGV  1 the expected beginning of the present value, '' if the key is expected to be missing
--       2 the new value, '' to delete the key        3 ttl of the new value in ms, an integer
-- Returns  1                 changed, or the key has the new value already (a request sent twice)
--          0                 the key is missing, although a value was expected
--          {pttl_ms, value}  the key has another value, and keeps it
local current = redis.call('GET', KEYS[1])
if current and current == ARGV[2] then
  return 1
end
if not current and ARGV[1] ~= '' then
  return 0
end
if current and (ARGV[1] == '' or string.sub(current, 1, #ARGV[1]) ~= ARGV[1]) then
  return {redis.call('PTTL', KEYS[1]), current}
end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return 1
