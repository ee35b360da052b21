-- What a node finds out before it votes, in three scripts.

-- Record the run id of the server; begin a grace period if the node knows none, or another one.
-- server: '' without a restart guard. ms: of the grace period
local function note_server(run, quiet, server, ms)
  if server == '' or redis.call('GET', run) == server then
    return
  end
  if tonumber(ms) > redis.call('PTTL', quiet) then
    redis.call('SET', quiet, '1', 'PX', ms)
  end
  redis.call('SET', run, server)
end

-- 0 without a completion marker; below 0 if a later send, whose id follows, has superseded the run; else
-- how many ms ago the run has ended, 1 at least
local function ended_for(marker)
  local kept = tonumber(string.match(redis.call('GET', marker) or '', '^%-?%d+') or 0)
  return kept > 0 and math.max(1, kept - redis.call('PTTL', marker)) or kept
end

-- ms since 1970 by the node's clock
local function wall()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
