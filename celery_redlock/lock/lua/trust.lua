-- Take an operator's word that no lock was forgotten: the node votes at once.
-- KEYS  1 the node's run id   2 the node's silence
-- ARGV  1 the run id of the server that this connection reached
-- Returns  1 where the node was silent, 0 where it was not
redis.call('SET', KEYS[1], ARGV[1])
return redis.call('DEL', KEYS[2])
