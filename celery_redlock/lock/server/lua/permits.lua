-- The names of a lock's keys, one for each permit, in three scripts.
local function permits(base, limit)
  local names = {base}
  for permit = 1, tonumber(limit) - 1 do
    names[permit + 1] = base .. '#' .. permit
  end
  return names
end
