-- Change what stands for a send, if that is what the caller believes it to be (compare and set).
-- KEYS  1 the key of what is sent once
-- ARGV  1 what the value begins with now, '' where nothing stands there
--       2 the new value, '' for none        3 its ttl in ms, an integer
-- Returns  1                 changed, or the new value stands there already (a request sent twice)
--          0                 nothing stands there, though something should
--          {pttl_ms, value}  another value stands there, and stays
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
