-- Read the node's fencing counter, and set it if it is one that no client has raised.
-- KEYS  1 the counter
-- ARGV  1 the counter of a quorum of the other nodes   2 the greatest plausible counter; neither
--       if it is to be read alone
-- Returns  the counter, 0 if the node has none; -1 if it is no number, or too large for one
local text = redis.pcall('GET', KEYS[1])  -- an error if another program has written another type
local counter = type(text) == 'table' and -1 or tonumber(text or '0') or -1
if not (counter >= 0 and counter <= 9007199254740990) then
  counter = -1
end
if ARGV[1] and (counter < 0 or counter > tonumber(ARGV[2])) then
  redis.call('SET', KEYS[1], ARGV[1])
end
return counter
