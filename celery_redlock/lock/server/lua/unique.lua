-- Compare and set the claim of a unique send. A key has the value, the ms at which the first send of
-- its burst came, and the ms at which the claim ends, by this node's clock: so a claim ends on time,
-- however late a confirmation comes. A second line has the claim that an unconfirmed one replaced.
-- KEYS  1 the key of the unique send
-- ARGV  1 the expected beginning of the present value, '' if the key is expected to be missing
--       2 the new value; '' to delete the key
--       3 ms until the new claim ends, '' to confirm the present one; with an empty value: 'back' to
--         put back the claim that was replaced, if there is one
--       4 the most ms for which a new claim is kept without a confirmation
--       5 the age of the burst that a new claim joins, in ms; absent: it joins none
-- Returns  1                      changed, or the key has the new value already (a request sent twice)
--          0                      the key is missing, although a value was expected
--          {pttl_ms, value, age}  the key has another value, and keeps it; age: ms since the first send
--                                 of its burst
local now, current = wall(), redis.call('GET', KEYS[1])
local line, replaced = string.match(current or '', '^([^\n]*)\n?(.*)$')
local value, first, ends = string.match(line, '^(.*) (%d+) (%d+)$')
value = value or line
local began = now - (ARGV[5] or 0)
if current and value == ARGV[2] then
  if ARGV[5] then  -- this node has missed the burst, so it took the claim for the first of one
    first, ends = math.min(first, began), math.min(ends, now + ARGV[3])
    local rest = string.sub(current, #line + 1)
    local stored = string.format('%s %.0f %.0f', value, first, ends) .. rest
    redis.call('SET', KEYS[1], stored, 'PX', math.max(1, redis.call('PTTL', KEYS[1])))
  end
  return 1
end
if not current and ARGV[1] ~= '' then
  return 0
end
if current and (ARGV[1] == '' or string.sub(value, 1, #ARGV[1]) ~= ARGV[1]) then
  return {redis.call('PTTL', KEYS[1]), value, math.max(0, now - (first or now))}
end
local stored, left = '', 0
if ARGV[2] ~= '' then
  local is_new = ARGV[3] ~= ''
  ends = is_new and now + ARGV[3] or ends or now
  left = is_new and math.min(ARGV[3], ARGV[4]) or ends - now
  stored = string.format('%s %.0f %.0f', ARGV[2], math.min(first or now, began), ends)
  if is_new and current then
    stored = stored .. '\n' .. line
  end
elseif ARGV[3] == 'back' and replaced ~= '' then
  stored, left = replaced, string.match(replaced, '%d+$') - now
end
if left < 1 then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], stored, 'PX', string.format('%.0f', left))
end
return 1
