-- The server commands that the shipped scripts call, over one table for each node; replies in RESP.
-- An entry of a store is {value, ends, kind}. value: a string; 'set': the scores of a sorted set by
-- member; 'hash': fields and their values in turn, in the order in which the fields came. ends: the
-- last ms of the node's clock with the key, or nil.
local store, now
local commands = {}

local function live(key)
  local entry = store[key]
  if entry and entry[2] and now > entry[2] then
    store[key] = nil
    return nil
  end
  return entry
end

local function fail(text)
  error({err = text}, 0)
end

local function whole(ms)
  local text = type(ms) == 'number' and string.format('%.17g', ms) or ms
  if not string.find(text, '^-?%d+$') then
    fail('ERR value is not an integer or out of range')
  end
  return tonumber(text)
end

local function of_type(key, kind)
  local entry = live(key)
  if entry and entry[3] ~= kind then
    fail('WRONGTYPE Operation against a key holding the wrong kind of value')
  end
  return entry
end

function commands.GET(key)
  local entry = of_type(key, 'string')
  return entry and entry[1] or false
end

function commands.MGET(...)
  local found = {}
  for number, key in ipairs({...}) do
    local entry = live(key)
    found[number] = entry and entry[3] == 'string' and entry[1] or false
  end
  return found
end

function commands.SET(key, value, px, ms)
  local ends = nil
  if px then
    ends = whole(ms)
    if ends <= 0 then
      fail("ERR invalid expire time in 'set' command")
    end
    ends = now + ends
  end
  store[key] = {value, ends, 'string'}
  return {ok = 'OK'}
end

function commands.DEL(key)
  local entry = live(key)
  store[key] = nil
  return entry and 1 or 0
end

function commands.EXISTS(...)
  local there = 0
  for _, key in ipairs({...}) do
    there = there + (live(key) and 1 or 0)
  end
  return there
end

function commands.PTTL(key)
  local entry = live(key)
  if not entry then
    return -2
  end
  return entry[2] and entry[2] - now or -1
end

function commands.PEXPIRE(key, ms)
  local entry = live(key)
  ms = whole(ms)
  if not entry then
    return 0
  end
  if ms <= 0 then
    store[key] = nil
  else
    entry[2] = now + ms
  end
  return 1
end

function commands.PUBLISH(channel, message)
  return publish(channel, message)  -- a function that `Engine` in model.py sets
end

function commands.PUBSUB(kind, ...)
  if string.upper(kind) ~= 'NUMSUB' then
    fail("ERR unknown subcommand '" .. kind .. "'. Try PUBSUB HELP.")
  end
  local counts = {}
  for _, channel in ipairs({...}) do
    counts[#counts + 1] = channel
    counts[#counts + 1] = subscribers(channel)  -- a function that `Engine` in model.py sets
  end
  return counts
end

-- The sorted sets.

local function scores(key)
  local entry = of_type(key, 'set')
  return entry and entry[1] or {}
end

local function ranked(set)
  local members = {}
  for member in pairs(set) do
    members[#members + 1] = member
  end
  table.sort(members, function(one, other)
    if set[one] ~= set[other] then
      return set[one] < set[other]
    end
    return one < other
  end)
  return members
end

local function float(text)
  local number = tonumber(text)
  if not number or number ~= number then
    fail('ERR value is not a valid float')
  end
  return number
end

local function shown(score)
  if score == math.huge or score == -math.huge then
    return score > 0 and 'inf' or '-inf'
  end
  for digits = 15, 17 do
    local text = string.format('%.' .. digits .. 'g', score)
    if tonumber(text) == score then
      return text
    end
  end
end

function commands.ZADD(key, ...)
  local words, added, only = {...}, 0, nil
  if words[1] and string.upper(words[1]) == 'XX' then
    only = table.remove(words, 1)
  end
  if #words % 2 ~= 0 then
    fail('ERR syntax error')
  end
  for i = 1, #words, 2 do
    float(words[i])
  end
  local entry = of_type(key, 'set')
  if not entry then
    if only then
      return 0
    end
    entry = {{}, nil, 'set'}
    store[key] = entry
  end
  for i = 1, #words, 2 do
    local member = words[i + 1]
    if entry[1][member] or not only then
      added = added + (entry[1][member] and 0 or 1)
      entry[1][member] = float(words[i])
    end
  end
  return added
end

function commands.ZREM(key, ...)
  local set, gone = scores(key), 0
  for _, member in ipairs({...}) do
    gone = gone + (set[member] and 1 or 0)
    set[member] = nil
  end
  if not next(set) then
    store[key] = nil
  end
  return gone
end

function commands.ZRANGE(key, first, last, how)
  if how and string.upper(how) ~= 'WITHSCORES' then
    fail('ERR syntax error')
  end
  first, last = whole(first), whole(last)
  local set, found = scores(key), {}
  local members = ranked(set)
  first = math.max(first < 0 and #members + first or first, 0)
  last = last < 0 and #members + last or last
  for rank = first, math.min(last, #members - 1) do
    found[#found + 1] = members[rank + 1]
    if how then
      found[#found + 1] = shown(set[members[rank + 1]])
    end
  end
  return found
end

-- A bound of a range of scores; '(': the score itself is not in it.
local function bound(text)
  local open = string.sub(text, 1, 1) == '('
  local number = open and string.sub(text, 2) or text
  local score = number == '' and 0 or tonumber(number)
  if not score or score ~= score then
    fail('ERR min or max is not a float')
  end
  return score, open
end

function commands.ZRANGEBYSCORE(key, least, most, how)
  if how and string.upper(how) ~= 'WITHSCORES' then
    fail('ERR syntax error')
  end
  local from, after = bound(least)
  local to, before = bound(most)
  local set, found = scores(key), {}
  for _, member in ipairs(ranked(set)) do
    local score = set[member]
    local above = score > from or (score == from and not after)
    if above and (score < to or (score == to and not before)) then
      found[#found + 1] = member
      if how then
        found[#found + 1] = shown(score)
      end
    end
  end
  return found
end

function commands.ZRANK(key, wanted)
  for place, member in ipairs(ranked(scores(key))) do
    if member == wanted then
      return place - 1
    end
  end
  return false
end

function commands.ZCARD(key)
  return #ranked(scores(key))
end

function commands.ZSCORE(key, member)
  local score = scores(key)[member]
  return score and shown(score) or false
end

-- The hashes.

local function fields(key)
  local entry = of_type(key, 'hash')
  return entry and entry[1] or {}
end

local function place(hash, field)
  for i = 1, #hash, 2 do
    if hash[i] == field then
      return i
    end
  end
end

function commands.HGET(key, field)
  local hash = fields(key)
  local at = place(hash, field)
  return at and hash[at + 1] or false
end

function commands.HGETALL(key)
  return {unpack(fields(key))}
end

function commands.HSET(key, ...)
  local words, added = {...}, 0
  if #words == 0 or #words % 2 ~= 0 then
    error()
  end
  local entry = of_type(key, 'hash')
  if not entry then
    entry = {{}, nil, 'hash'}
    store[key] = entry
  end
  local hash = entry[1]
  for i = 1, #words, 2 do
    local at = place(hash, words[i])
    if not at then
      at, added = #hash + 1, added + 1
      hash[at] = words[i]
    end
    hash[at + 1] = words[i + 1]
  end
  return added
end

function commands.HDEL(key, ...)
  local hash, gone = fields(key), 0
  for _, field in ipairs({...}) do
    local at = place(hash, field)
    if at then
      table.remove(hash, at)
      table.remove(hash, at)
      gone = gone + 1
    end
  end
  if #hash == 0 then
    store[key] = nil
  end
  return gone
end

function commands.TIME()
  local seconds = math.floor(now / 1000)
  return {string.format('%.0f', seconds), string.format('%.0f', (now - seconds * 1000) * 1000)}
end

redis = {}

function redis.call(name, ...)
  return commands[name](...)
end

function redis.pcall(name, ...)
  local fine, reply = pcall(commands[name], ...)
  return reply
end

function redis.error_reply(text)
  return {err = text}
end

local function encoded(reply)
  local kind = type(reply)
  if kind == 'number' then
    return string.format(':%d\r\n', reply)
  elseif kind == 'string' then
    return string.format('$%d\r\n', #reply) .. reply .. '\r\n'
  elseif kind ~= 'table' then
    return reply and ':1\r\n' or '$-1\r\n'
  elseif reply.err then
    return '-' .. reply.err .. '\r\n'
  elseif reply.ok then
    return '+' .. reply.ok .. '\r\n'
  end
  local words = {string.format('*%d\r\n', #reply)}
  for _, item in ipairs(reply) do
    words[#words + 1] = encoded(item)
  end
  return table.concat(words)
end

-- Called by `Engine` in model.py. run: a script's function, for one node at a ms of its clock.
function run(body, of, at, count, ...)
  store, now = of, at
  local words, keys, arguments = {...}, {}, {}
  count = tonumber(count)
  for i = 1, #words do
    if i <= count then
      keys[i] = words[i]
    else
      arguments[i - count] = words[i]
    end
  end
  KEYS, ARGV = keys, arguments
  local fine, reply = pcall(body)
  if not fine and type(reply) ~= 'table' then
    error(reply, 0)
  end
  return encoded(reply)
end

-- call: a plain command of a client, nil if it is unknown.
local plain = {}
for name, command in pairs(commands) do
  plain[name] = command
end

function plain.SET(key, value, ...)
  local words, stands, at, before = {...}, live(key) ~= nil, 1, nil
  local options = {}
  while at <= #words do
    local word = string.upper(words[at])
    if word == 'PX' or word == 'EX' then
      at = at + 1
      options.ms = whole(words[at]) * (word == 'EX' and 1000 or 1)
    elseif word == 'NX' or word == 'XX' or word == 'GET' then
      options[word] = true
    else
      fail('ERR syntax error')
    end
    at = at + 1
  end
  if options.GET then
    before = commands.GET(key)
  end
  local refused = options.NX and stands or options.XX and not stands
  if not refused then
    commands.SET(key, value, options.ms and 'PX', options.ms)
  end
  if options.GET then
    return before
  end
  return not refused and {ok = 'OK'}
end

function plain.DEL(...)
  local gone = 0
  for _, key in ipairs({...}) do
    gone = gone + commands.DEL(key)
  end
  return gone
end

function plain.FLUSHALL()
  for key in pairs(store) do
    store[key] = nil
  end
  return {ok = 'OK'}
end
plain.FLUSHDB = plain.FLUSHALL

function call(of, at, name, ...)
  store, now = of, at
  local command = plain[name]
  if not command then
    return nil
  end
  local fine, reply = pcall(command, ...)
  if not fine and type(reply) ~= 'table' then
    return "-ERR wrong number of arguments for '" .. string.lower(name) .. "' command\r\n"
  end
  return encoded(reply)
end

-- The others read the keys of one node from outside, or copy them.
function look(of, at, key)
  store, now = of, at
  local entry = live(key)
  return entry and entry[3] == 'string' and entry[1] or nil, commands.PTTL(key)
end

function copy(of)
  local made = {}
  for key, entry in pairs(of) do
    local value = entry[1]
    if type(value) == 'table' then
      value = {}
      for name, part in pairs(entry[1]) do
        value[name] = part
      end
    end
    made[key] = {value, entry[2], entry[3]}
  end
  return made
end

function names(of, at)
  store, now = of, at
  local found = {}
  for key in pairs(of) do
    found[#found + 1] = key
  end
  local alive = {}
  for _, key in ipairs(found) do
    if live(key) then
      alive[#alive + 1] = key
    end
  end
  table.sort(alive)
  return table.concat(alive, '\n')
end
