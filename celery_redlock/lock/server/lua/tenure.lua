-- Tenures, in two scripts: since (ms), a space, run id. All that is none counts as '': another program
-- has written it. From 15 digits on, an added 1 might be lost.
local function tenure(text)
  local digits = #text <= 100 and string.match(text, '^(%d+) %S+$')
  return digits and #digits < 15 and text or ''
end

local function recorded(key)
  local value = redis.pcall('GET', key)  -- an error if another program has written another type
  return type(value) == 'string' and tenure(value) or ''
end

local function since(known)
  return tonumber(string.match(known, '^%d+') or 0)
end

local function run(known)
  return string.match(known, ' (.*)$')
end

