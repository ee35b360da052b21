-- Change what is queued of a resource whose sends replace each other, and keep the order of its
-- sends and starts. Each send has a number, and a node takes no number twice and none that is less
-- than one it has taken. The claim has a line for each message, the newest first, as of lua/unique.lua
-- but for the number behind the value: the value, the number, the ms at which its burst began, and the
-- ms at which the line ends. An unconfirmed send is the first line, and ends soon. Below it is the
-- message that the next send replaces, and last a message that keeps its place. While that is there,
-- the burst of the other one has not begun. A node that has missed sends has an older message instead.
-- KEYS  1 the key of the unique send   2 the order: the largest number, the number of the newest
--       start, and the id of its task. A second line says what was replaced: the messages above one
--       number up to another, but for the one that keeps its place; the number of the newest
--       message, that of the kept one, that of the newest message before the burst, and the task id
--       of the send that replaced the last one
-- ARGV  1 'send':  2 the expected beginning of the queued value, '' if nothing is queued; 3 the value
--                  of the new send, '' to take its number alone; 4 its number; 5 the ms for which it
--                  is kept without a confirmation; 6 the ms for which the order is kept; 7 the number
--                  of what is expected: what is older is replaced, too
--         'sent':  2 the token of a send; 3 its value from now on; 4 ms from its send to its end;
--                  5 the age of the burst that it joins, in ms; 6 the token of the message that it
--                  replaces, '' if there is none, or if that keeps its place; 7 its number; 8 the
--                  token of the message that keeps its place, or ''; 9 its number; 10 the most ms from
--                  the beginning of its burst for which later sends let that one count: then it is
--                  lost
--         'end':   2 the token of a send that is given up, or of a message that ends without a start
--         'start': 2 the token of a message whose run starts; 3 its number; 4 the id of its task;
--                  5 the ms for which the order is kept; 6 'anyway' for a message that no majority
--                  counts as replaced, else ''
-- Returns  1                      done, or done before (a request sent twice)
--          0                      nothing is queued, although a value was expected; or 'sent', and the
--                                 send is no more the newest
--          {pttl_ms, value, age, number, kept, kept_number}  'send': of the newest message, which is
--                                 another one; age: ms since its burst began; kept: the value of what
--                                 keeps its place, or ''; of an unconfirmed one, of what it may replace
--          a number below 0       'send': the number was not taken; the largest number is its opposite
--          {number, id}           'start': a later send has started, or the message was replaced, and
--                                 the number is below 0; the task id of a later one
local now, lines, what, token = wall(), {}, ARGV[1], ARGV[2]

local function begins_with(line, beginning)
  return line ~= nil and beginning ~= '' and string.sub(line.value, 1, #beginning) == beginning
end

local function is_sent(line)
  return line ~= nil and string.find(line.value, '^[^:]*:sent:.') ~= nil
end

local left = redis.call('PTTL', KEYS[1])
local latest = now + (left < 0 and 2 ^ 40 or left + 10)  -- also of a line of lua/unique.lua
for text in string.gmatch(redis.call('GET', KEYS[1]) or '', '[^\n]+') do
  local value, began, ends = string.match(text, '^(.*) (%d+) (%d+)$')
  local numbered, number = string.match(value or '', '^(.*) (%d+)$')
  ends = math.min(tonumber(ends or latest), latest)
  if ends > now then
    lines[#lines + 1] = {
      value = numbered or value or text, number = tonumber(number or 0),
      began = tonumber(began or now), ends = ends,
    }
  end
end

local function store()
  local texts, most = {}, 0
  for place, line in ipairs(lines) do
    texts[place] = string.format('%s %.0f %.0f %.0f', line.value, line.number, line.began, line.ends)
    most = math.max(most, line.ends - now)
  end
  if most < 1 then
    redis.call('DEL', KEYS[1])
  else
    redis.call('SET', KEYS[1], table.concat(texts, '\n'), 'PX', string.format('%.0f', most))
  end
end

local order = redis.call('GET', KEYS[2]) or ''
local largest, started, id = string.match(order, '^(%d+) (%d+) ([^\n]*)')
largest, started, id = tonumber(largest or 0), tonumber(started or 0), id or ''
local low, replaced, last, stays, before, later =
  string.match(order, '\n(%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
low, replaced, later = tonumber(low or 0), tonumber(replaced or 0), later or ''
last, stays, before = tonumber(last or 0), tonumber(stays or 0), tonumber(before or 0)

local function keep_order(ms)
  local kept = math.max(tonumber(ms), redis.call('PTTL', KEYS[2]))
  local text = string.format('%.0f %.0f ', largest, started) .. id
  if last > 0 then
    text = text .. string.format('\n%.0f %.0f %.0f %.0f %.0f ', low, replaced, last, stays, before)
      .. later
  end
  redis.call('SET', KEYS[2], text, 'PX', string.format('%.0f', kept))
end

if what == 'send' then
  local value, number, newest = ARGV[3], tonumber(ARGV[4]), lines[1]
  if value ~= '' then
    if newest and newest.value == value then
      return 1
    elseif newest and not (is_sent(newest) and token ~= ''
        and (begins_with(newest, token) or newest.number < tonumber(ARGV[7]))) then
      local age = lines[2] and 0 or math.max(0, now - newest.began)
      local kept = lines[2] or {value = '', number = 0}
      return {left, newest.value, age, newest.number, kept.value, kept.number}
    elseif not newest and token ~= '' then
      return 0
    end
  end
  if number <= largest then
    return -largest
  end
  largest = number
  keep_order(ARGV[6])
  if value ~= '' then
    table.insert(lines, 1, {value = value, number = number, began = now, ends = now + ARGV[5]})
    store()
  end
  return 1
elseif what == 'sent' then
  local sent, kept = lines[1], nil
  if not begins_with(sent, token) then
    return 0
  elseif not is_sent(sent) then
    sent.value, sent.ends, sent.began = ARGV[3], sent.began + ARGV[4], sent.began - ARGV[5]
    for place = 2, #lines do  -- any other one has been replaced, or has started
      local line = lines[place]
      if begins_with(line, ARGV[6]) then
        sent.began = math.min(sent.began, line.began)
      elseif begins_with(line, ARGV[8]) then  -- it counts for as long as the resource is sent
        kept = line
        kept.ends = math.max(kept.ends, math.min(sent.ends, kept.began + ARGV[10]))
      end
    end
    lines = {sent, kept}
    store()
    local earlier, kept_number = tonumber(ARGV[7]), tonumber(ARGV[9])
    if earlier == 0 and kept_number == 0 then
      before = last  -- its claim had ended, so it was not replaced, and is to start
    else
      if last ~= (earlier > 0 and earlier or kept_number) then
        low = last  -- the same, and the beginning of this burst was missed here
      elseif stays > started and stays ~= kept_number then
        low = stays  -- its place had ended
      end
      low, stays = math.max(low, before), kept_number
      if earlier > 0 then
        replaced, later = earlier, string.match(ARGV[3], '^[^:]*:sent:([^:]*)')
      end
    end
    last = sent.number
    keep_order(ARGV[4])
  end
  return 1
end

local number = 0
if what == 'start' then
  number = tonumber(ARGV[3])
  if started > number then
    return {started, id}
  elseif ARGV[6] ~= 'anyway' and number > low and number <= replaced
      and number ~= stays and number ~= started then
    return {-replaced, later}
  end
  largest, started, id = math.max(largest, number), number, ARGV[4]
  keep_order(ARGV[5])
end
local remaining = {}
for _, line in ipairs(lines) do  -- what was sent before a run that has started does not start any more
  if not begins_with(line, token) and (what == 'end' or line.number > number) then
    remaining[#remaining + 1] = line
  end
end
if #remaining < #lines then
  if #remaining > 0 and remaining[#remaining] ~= lines[#lines] then
    remaining[#remaining].began = now
  end
  lines = remaining
  store()
end
return 1
