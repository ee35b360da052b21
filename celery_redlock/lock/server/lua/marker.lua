-- Read the completion marker of a run.
-- KEYS  1 the marker
-- Returns  0 without a marker; below 0 if a later send has superseded the run; else how many ms ago
--          the run has ended, 1 at least
local kept = tonumber(redis.call('GET', KEYS[1]) or 0) or 0
if kept <= 0 then
  return kept
end
return math.max(1, kept - redis.call('PTTL', KEYS[1]))
