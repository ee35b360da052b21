-- Read the completion marker of a run.
-- KEYS  1 the marker
-- Returns  as `ended_for` of lua/vote.lua
return ended_for(KEYS[1])
