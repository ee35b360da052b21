-- Record the run id of the server. Begin a grace period, in which the node abstains, if the server
-- may have forgotten locks, or if another server has served under this node's address since.
-- Exchange the newest tenures at the other nodes' addresses with the client.
-- KEYS  1 the node's run id   2 exists during the node's grace period
--       3 the node's tenure: since (ms), run id
--       4...: the newest tenure at the address of each other node, as recorded on this node
-- ARGV  1 the run id of the server that this connection reached
--       2 grace period in ms, which begins if the node knows no run id, or another one
--       3 the newest tenure at this node's address that the client knows, '' for none
--       4 ttl in ms of the records about other nodes
--       5...: the newest tenure that the client knows for each key from 4 on, '' for none
-- Returns a list: ms of the grace period that remain, the node's tenure, and the record for each
-- key from 4 on ('' for none). A record that is later than the node's clock is not returned: another
-- program has written it, or the clocks differ by less than a grace period, and it is returned soon.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known, before = redis.call('GET', KEYS[1]), recorded(KEYS[3])
local own, elsewhere = before, tenure(ARGV[3])
if run(own) ~= ARGV[1] then  -- copied from another server, or lost
  own = '0 ' .. ARGV[1]
end
if run(elsewhere) == ARGV[1] and since(elsewhere) > since(own) then
  own = elsewhere
end
local ms
if known ~= ARGV[1] then
  ms = tonumber(ARGV[2])
elseif elsewhere ~= '' and run(elsewhere) ~= ARGV[1] and since(elsewhere) >= since(own) then
  ms = tonumber(ARGV[2])
elseif before ~= '' and run(before) ~= ARGV[1] and since(own) == 0 then
  ms = 0  -- a grant has begun the grace period already: this script could not run before it
end
if ms then
  local begun = math.max(now, since(before) + 1, since(elsewhere) + 1)
  own = string.format('%.0f %s', begun, ARGV[1])
  if ms > 0 and ms > redis.call('PTTL', KEYS[2]) then
    redis.call('SET', KEYS[2], '1', 'PX', ms)
  end
  redis.call('SET', KEYS[1], ARGV[1])
end
if own ~= before then
  redis.call('SET', KEYS[3], own)
end
local found = {math.max(0, redis.call('PTTL', KEYS[2])), own}
for i = 4, #KEYS do
  local note, told = recorded(KEYS[i]), tenure(ARGV[i + 1])
  if told ~= '' and (note == '' or since(note) > now or since(told) > since(note)) then
    redis.call('SET', KEYS[i], told, 'PX', ARGV[4])
    note = told
  elseif told ~= '' and told == note then
    redis.call('PEXPIRE', KEYS[i], ARGV[4])
  end
  found[#found + 1] = since(note) > now and '' or note
end
return found
