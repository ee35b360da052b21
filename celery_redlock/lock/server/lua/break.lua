-- Take a lock from its holder on an operator's word, and let none of its repairs bring it back.
-- KEYS  1 the lock's key   2 the note of this value's break
-- ARGV  1 the value that is to go: token:since:label   2 ms for which the note stays, an integer
--       3 the channel of its waiters
-- Returns  1  it is gone
--          0  it did not stand there (any more), and what does stays; the note is made all the same
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
redis.pcall('PUBLISH', ARGV[3], ARGV[1])
return 1
