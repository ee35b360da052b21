-- The server commands that the shipped scripts call, over one table for each node; replies in RESP.
-- An entry of a store is {value, ends}; ends: the last ms of the node's clock with the key, or nil.
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

function commands.GET(key)
  local entry = live(key)
  return entry and entry[1] or false
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
  store[key] = {value, ends}
  return {ok = 'OK'}
end

function commands.DEL(key)
  local entry = live(key)
  store[key] = nil
  return entry and 1 or 0
end

function commands.EXISTS(key)
  return live(key) and 1 or 0
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

function plain.MGET(...)
  local found = {}
  for number, key in ipairs({...}) do
    local entry = live(key)
    found[number] = entry and entry[1] or false
  end
  return found
end

function plain.DEL(...)
  local gone = 0
  for _, key in ipairs({...}) do
    gone = gone + commands.DEL(key)
  end
  return gone
end

function plain.EXISTS(...)
  local there = 0
  for _, key in ipairs({...}) do
    there = there + commands.EXISTS(key)
  end
  return there
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

-- The others read and change the keys of one node from outside.
function peek(of, at, key)
  store, now = of, at
  return commands.GET(key)
end

function look(of, at, key)
  store, now = of, at
  return commands.GET(key), commands.PTTL(key)
end

function put(of, at, key, value, ms)
  store, now = of, at
  commands.SET(key, value, 'PX', ms)
end

function drop(of, at, key)
  store, now = of, at
  commands.DEL(key)
end

function copy(of)
  local made = {}
  for key, entry in pairs(of) do
    made[key] = {entry[1], entry[2]}
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
