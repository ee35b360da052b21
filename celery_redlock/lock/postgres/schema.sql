-- A PostgreSQL server as a node: what the Lua scripts of lock/server/lua do, over two tables.
--
-- Each script is a function of its keys and its arguments, as its Lua header says, and returns the
-- same reply, as RESP. `command` runs what is no script. On Redis scripts run one at a time. Here
-- those of one resource do: each takes an advisory lock first, and reads the clock after that. READ
-- COMMITTED is required: any other isolation level reads what was true before that lock.

-- All statements run in one transaction. They create the schema, or move one of an earlier version in
-- place: no row goes, and the calls that run meanwhile hold the same turns. `redlock.setup` says what
-- they did: new, trusted (a new one whose server votes at once), moved, or there.
SET search_path TO pg_catalog;  -- no operator of another schema is meant; each call sets it, too
DO $$
DECLARE version int;
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('redlock setup', 0));
  IF to_regprocedure('redlock.version()') IS NULL THEN
    CREATE SCHEMA redlock;
  ELSE
    version := redlock.version();
  END IF;
  IF version > 4 THEN
    RAISE EXCEPTION 'NEWERSCHEMA version %, and this release needs 4', version;
  END IF;
  PERFORM set_config('redlock.setup', CASE WHEN version IS NULL THEN 'new'
    WHEN version < 4 THEN 'moved' ELSE 'there' END, true);
END $$;

CREATE OR REPLACE FUNCTION redlock.version() RETURNS int LANGUAGE sql STABLE RETURN 4;

-- Texts, and a row for each set. id: sha256 of the name, because an index takes no long name.
CREATE TABLE IF NOT EXISTS redlock.key (
  id bytea PRIMARY KEY,
  name bytea NOT NULL,
  value bytea NOT NULL,
  expires_at timestamptz  -- NULL: never
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- Members of sorted sets, with scores, and fields of hashes, with values.
CREATE TABLE IF NOT EXISTS redlock.item (
  id bytea NOT NULL,
  field bytea NOT NULL,
  score float8,
  value bytea,
  PRIMARY KEY (id, field)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- When the last sweep ended, or -infinity, and after which id it goes on.
CREATE TABLE IF NOT EXISTS redlock.swept (at timestamptz NOT NULL, after bytea NOT NULL);
INSERT INTO redlock.swept SELECT '-infinity', '' WHERE NOT EXISTS (SELECT FROM redlock.swept);

-- Words and replies. STABLE, because PostgreSQL does not inline an IMMUTABLE function whose body is not:
-- `convert_to`, a number in a text, and an interval added to a time are STABLE.

CREATE OR REPLACE FUNCTION redlock.text_of(word bytea) RETURNS text LANGUAGE sql STABLE
RETURN encode(word, 'escape');

CREATE OR REPLACE FUNCTION redlock.word(text text) RETURNS bytea LANGUAGE sql STABLE
RETURN convert_to(text, 'UTF8');

CREATE OR REPLACE FUNCTION redlock.number(word bytea) RETURNS bigint LANGUAGE sql STABLE
RETURN nullif(encode(word, 'escape'), '')::bigint;

CREATE OR REPLACE FUNCTION redlock.integer(number bigint) RETURNS bytea LANGUAGE sql STABLE
RETURN redlock.word(':' || number || E'\r\n');

CREATE OR REPLACE FUNCTION redlock.bulk(word bytea) RETURNS bytea LANGUAGE sql STABLE
RETURN coalesce(redlock.word('$' || length(word) || E'\r\n') || word || '\x0d0a', '\x242d310d0a');

-- Without the NULLs among them: numbers that a script returns only if they were asked for.
CREATE OR REPLACE FUNCTION redlock.list(VARIADIC replies bytea[]) RETURNS bytea LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
  items int := 0;
  text bytea := '';
  reply bytea;
BEGIN
  FOREACH reply IN ARRAY replies LOOP
    IF reply IS NOT NULL THEN  -- NULL: a number that a script adds only if it was asked for it
      items := items + 1;
      text := text || reply;
    END IF;
  END LOOP;
  RETURN convert_to('*' || items || E'\r\n', 'UTF8') || text;
END $$;

CREATE OR REPLACE FUNCTION redlock.bulks(words bytea[]) RETURNS bytea LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
  RETURN redlock.list(VARIADIC array(SELECT redlock.bulk(w) FROM unnest(words) AS w));
END $$;

-- Time, the server, and turns

CREATE OR REPLACE FUNCTION redlock.ms(at timestamptz) RETURNS bigint LANGUAGE sql STABLE
RETURN floor(extract(epoch FROM at) * 1000)::bigint;

-- When a time ends that begins at `at`: never if ms is NULL.
CREATE OR REPLACE FUNCTION redlock.after(at timestamptz, ms bigint) RETURNS timestamptz LANGUAGE sql STABLE
RETURN at + ms * interval '1 millisecond';

-- As PTTL: -1 if the time does not end.
CREATE OR REPLACE FUNCTION redlock.left_ms(ends timestamptz, at timestamptz) RETURNS bigint
LANGUAGE sql STABLE RETURN CASE WHEN ends IS NULL THEN -1
  ELSE greatest(0, floor(extract(epoch FROM ends - at) * 1000)::bigint) END;

-- The run id names the cluster, the database, the schema and the timeline. It is another one after a
-- standby was promoted, because that may lack grants, and behind a pooler that has moved to another
-- server or database. A server that restarts from its own disk has the same. Each call compares it, so
-- the first two are read once for each server process: that reads a file.
CREATE OR REPLACE FUNCTION redlock.run_id() RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE place text := current_setting('redlock.place', true);
BEGIN
  IF place IS NULL OR place = '' THEN  -- '': another client of a pooler has reset its settings
    place := set_config('redlock.place', c.system_identifier || '-' || d.oid, false)
    FROM pg_control_system() AS c, pg_database AS d WHERE d.datname = current_database();
  END IF;
  RETURN place || '-' || 'redlock'::regnamespace::oid
    || '-' || left(pg_walfile_name(pg_current_wal_lsn()), 8);
END $$;

-- The first of each call: one that means another server is refused before it does anything. So what it
-- left here is never taken for its own once the client has connected again.
CREATE OR REPLACE FUNCTION redlock.served_by(expected text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  IF redlock.run_id() <> expected THEN
    RAISE EXCEPTION 'another server, database or schema answers than at the connect'
      USING ERRCODE = 'RL001';
  END IF;
  RETURN expected;
END $$;

-- The run id, with what stands before it in the words of a client.
CREATE OR REPLACE FUNCTION redlock.run_id(known text) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE actual text := redlock.run_id();
BEGIN
  RETURN CASE WHEN right(known, length(actual)) = actual THEN known ELSE actual END;
END $$;

CREATE OR REPLACE FUNCTION redlock.hash(name bytea, space int) RETURNS bigint LANGUAGE sql STABLE
RETURN hashtextextended(encode(name, 'escape'), space);

-- Begin a call that changes something; return the time.
CREATE OR REPLACE FUNCTION redlock.begin_call() RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'the isolation level is %, and must be read committed',
      current_setting('transaction_isolation') USING ERRCODE = '25001';
  END IF;
  -- otherwise a crash, or the end of a primary, would forget a grant that was confirmed
  IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
  RETURN clock_timestamp();
END $$;

-- Take the turn of a resource until the end of the transaction; return the time. A call takes one
-- turn, and that of the run id after it, if at all: so no two wait for each other.
CREATE OR REPLACE FUNCTION redlock.turn(name bytea) RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
  PERFORM redlock.begin_call(), pg_advisory_xact_lock(redlock.hash(name, 1));
  RETURN clock_timestamp();
END $$;

-- The turn of a lock has the name of permit 0: a name "lock#3" is that of a permit.
CREATE OR REPLACE FUNCTION redlock.turn_of_permit(name bytea) RETURNS timestamptz LANGUAGE sql
RETURN redlock.turn(regexp_replace(redlock.text_of(name), '#\d+$', '')::bytea);

-- Texts: what Redis does, at a time

CREATE OR REPLACE FUNCTION redlock.find(name bytea, at timestamptz) RETURNS redlock.key LANGUAGE plpgsql AS $$
DECLARE found redlock.key;
BEGIN
  SELECT * INTO found FROM redlock.key k
  WHERE k.id = sha256(find.name) AND (k.expires_at IS NULL OR k.expires_at > find.at);
  RETURN found;
END $$;

CREATE OR REPLACE FUNCTION redlock.get(name bytea, at timestamptz) RETURNS bytea LANGUAGE sql
RETURN (redlock.find(name, at)).value;

CREATE OR REPLACE FUNCTION redlock.pttl(name bytea, at timestamptz) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE found redlock.key := redlock.find(name, at);
BEGIN
  RETURN CASE WHEN found.id IS NULL THEN -2 ELSE redlock.left_ms(found.expires_at, at) END;
END $$;

-- ms: NULL: for ever
CREATE OR REPLACE FUNCTION redlock.put(name bytea, value bytea, ms bigint, at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO redlock.key
  VALUES (sha256(put.name), put.name, put.value, redlock.after(put.at, put.ms))
  ON CONFLICT ON CONSTRAINT key_pkey
  DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at;
END $$;

-- Return 1 if it was there.
CREATE OR REPLACE FUNCTION redlock.del(name bytea, at timestamptz) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  ends timestamptz;
  this bytea := sha256(name);
BEGIN
  DELETE FROM redlock.key k WHERE k.id = this RETURNING k.expires_at INTO ends;
  IF NOT FOUND THEN
    RETURN 0;
  END IF;
  DELETE FROM redlock.item i WHERE i.id = this;
  RETURN (ends IS NULL OR ends > at)::int;
END $$;

CREATE OR REPLACE FUNCTION redlock.expire(name bytea, ms bigint, at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  UPDATE redlock.key k SET expires_at = redlock.after(expire.at, expire.ms)
  WHERE k.id = sha256(expire.name) AND (k.expires_at IS NULL OR k.expires_at > expire.at);
END $$;

-- Of a lock that is ours: never shortens, as a renewal may have come after `at`.
CREATE OR REPLACE FUNCTION redlock.prolong(name bytea, ms bigint, at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  UPDATE redlock.key k SET expires_at = greatest(k.expires_at, redlock.after(prolong.at, prolong.ms))
  WHERE k.id = sha256(prolong.name) AND (k.expires_at IS NULL OR k.expires_at > prolong.at);
END $$;

-- Put a value where another client may have had the key: never while a transaction has confirmed
-- the old one (FOR KEY SHARE). Returns whether it is put. Deletes the old row, so that such a
-- transaction with an old snapshot gets an error of serialization.
CREATE OR REPLACE FUNCTION redlock.take_over(name bytea, value bytea, ms bigint, at timestamptz) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE this bytea := sha256(name);
BEGIN
  PERFORM FROM redlock.key k WHERE k.id = this AND k.expires_at <= at FOR UPDATE SKIP LOCKED;
  IF FOUND THEN
    DELETE FROM redlock.key k WHERE k.id = this;
  END IF;
  INSERT INTO redlock.key VALUES (this, name, value, redlock.after(at, ms)) ON CONFLICT DO NOTHING;
  RETURN FOUND;
END $$;

-- Sets and hashes. The row in redlock.key has their expiry, and goes with the last member: whoever
-- adds or removes a member locks it first, because some registrations wait for no turn of a lock.

CREATE OR REPLACE FUNCTION redlock.open(name bytea, at timestamptz) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE this bytea := sha256(name);
BEGIN
  PERFORM FROM redlock.key k
  WHERE k.id = this AND (k.expires_at IS NULL OR k.expires_at > at) FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    DELETE FROM redlock.key k WHERE k.id = this AND k.expires_at <= at;
    IF FOUND THEN
      DELETE FROM redlock.item i WHERE i.id = this;
    END IF;
    INSERT INTO redlock.key AS k VALUES (this, name, '')
    ON CONFLICT ON CONSTRAINT key_pkey DO UPDATE SET value = k.value;  -- another one came first
  END IF;
  RETURN this;
END $$;

CREATE OR REPLACE FUNCTION redlock.items(name bytea, at timestamptz) RETURNS SETOF redlock.item
LANGUAGE plpgsql AS $$
BEGIN
  RETURN QUERY
  SELECT i.* FROM redlock.item i JOIN redlock.key k USING (id)
  WHERE i.id = sha256(items.name) AND (k.expires_at IS NULL OR k.expires_at > items.at)
  ORDER BY i.score, i.field;
END $$;

CREATE OR REPLACE FUNCTION redlock.item_of(name bytea, field bytea, at timestamptz) RETURNS redlock.item
LANGUAGE plpgsql AS $$
DECLARE found redlock.item;
BEGIN
  SELECT * INTO found FROM redlock.items(item_of.name, item_of.at) AS i
  WHERE i.field = item_of.field;
  RETURN found;
END $$;

-- Add a member with its score, or a field with its value.
CREATE OR REPLACE FUNCTION redlock.add(name bytea, field bytea, score float8, value bytea, at timestamptz)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO redlock.item
  VALUES (redlock.open(add.name, add.at), add.field, add.score, add.value)
  ON CONFLICT ON CONSTRAINT item_pkey DO UPDATE SET score = excluded.score, value = excluded.value;
END $$;

-- Remove members of a set or fields of a hash; return how many there were.
CREATE OR REPLACE FUNCTION redlock.remove(name bytea, VARIADIC fields bytea[]) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  removed bigint;
  this bytea := sha256(name);
BEGIN
  PERFORM FROM redlock.key k WHERE k.id = this FOR NO KEY UPDATE;
  DELETE FROM redlock.item i WHERE i.id = this AND i.field = ANY (fields);
  GET DIAGNOSTICS removed = ROW_COUNT;
  DELETE FROM redlock.key k
  WHERE removed > 0 AND k.id = this AND NOT EXISTS (SELECT FROM redlock.item i WHERE i.id = this);
  RETURN removed;
END $$;

-- Messages. A listener has an advisory lock of its channel, so that its end is known at once.

CREATE OR REPLACE FUNCTION redlock.channel(name bytea) RETURNS text LANGUAGE sql STABLE
RETURN 'redlock_' || left(encode(sha256(name), 'hex'), 48);

-- A listener shares the lock of its channel. If another transaction has found that nobody listens,
-- it has that lock alone.
CREATE OR REPLACE FUNCTION redlock.is_heard(channel bytea) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  RETURN NOT pg_try_advisory_xact_lock(redlock.hash(channel, 2))
    AND pg_try_advisory_xact_lock_shared(redlock.hash(channel, 2));
END $$;

-- Return 1 if somebody listens. A message that PostgreSQL does not take is a hint that is lost.
CREATE OR REPLACE FUNCTION redlock.publish(channel bytea, message bytea) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  IF NOT redlock.is_heard(channel) THEN
    RETURN 0;
  END IF;
  IF length(message) < 5800 THEN
    PERFORM pg_notify(redlock.channel(channel), encode(message, 'base64'));
  END IF;
  RETURN 1;
END $$;

-- The scripts: k their keys, a their arguments

CREATE OR REPLACE FUNCTION redlock.note_server(run bytea, quiet bytea, server bytea, ms bytea, at timestamptz)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE actual bytea;
BEGIN
  IF server = '' THEN
    RETURN;
  END IF;
  actual := redlock.run_id(redlock.text_of(server))::bytea;
  IF redlock.get(run, at) = actual THEN
    RETURN;
  END IF;
  at := redlock.turn(run);
  IF redlock.get(run, at) = actual THEN  -- another client came first, or an operator
    RETURN;
  END IF;
  IF redlock.number(ms) > redlock.pttl(quiet, at) THEN
    PERFORM redlock.put(quiet, '1', redlock.number(ms), at);
  END IF;
  PERFORM redlock.put(run, actual, NULL, at);
END $$;

CREATE OR REPLACE FUNCTION redlock.ended_for(marker bytea, at timestamptz) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE kept bigint := coalesce(
  substring(redlock.text_of(redlock.get(marker, at)) FROM '^-?\d{1,18}')::bigint, 0);
BEGIN
  RETURN CASE WHEN kept > 0 THEN greatest(1, kept - redlock.pttl(marker, at)) ELSE kept END;
END $$;

CREATE OR REPLACE FUNCTION redlock."marker"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE sql
RETURN redlock.integer(redlock.ended_for(k[1], clock_timestamp()));

-- The fencing counter: NULL if another program has written what is no number.
CREATE OR REPLACE FUNCTION redlock.fence_of(value bytea) RETURNS bigint LANGUAGE sql STABLE
RETURN CASE WHEN value IS NULL THEN 0
  WHEN encode(value, 'escape') ~ '^\d{1,16}$' THEN encode(value, 'escape')::bigint END;

-- Add to the counter, at least up to a number; return it. In one statement, and last in its
-- transaction, because all locks have this one row.
CREATE OR REPLACE FUNCTION redlock.raise_fence(name bytea, by int, minimum bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE token bigint;
BEGIN
  INSERT INTO redlock.key AS k VALUES (sha256(name), name, greatest(by, minimum)::text::bytea)
  ON CONFLICT ON CONSTRAINT key_pkey DO UPDATE SET expires_at = NULL,
    value = greatest(redlock.fence_of(k.value) + by, minimum)::text::bytea
    WHERE redlock.fence_of(k.value) IS NOT NULL
  RETURNING redlock.fence_of(value) INTO token;
  RETURN token;
END $$;

-- The reply to a refused request. An expired lock is refused for as long as an open transaction has
-- confirmed it: its client tries again soon.
CREATE OR REPLACE FUNCTION redlock.refused(known redlock.key, at timestamptz, VARIADIC more bytea[])
RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  left_ms bigint := CASE WHEN known.expires_at <= at THEN 100
    ELSE redlock.left_ms(known.expires_at, at) END;
BEGIN
  RETURN redlock.list(VARIADIC array[redlock.integer(0), redlock.integer(left_ms),
    redlock.bulk(coalesce(known.value, '')), redlock.integer(redlock.ms(at))] || more);
END $$;

CREATE OR REPLACE FUNCTION redlock."grant"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(k[1]);
  ttl bigint := redlock.number(a[2]);
  known redlock.key;
  done bytea;
  token bigint;
BEGIN
  PERFORM redlock.note_server(k[2], k[3], a[4], a[5], at);
  IF k[5] IS NOT NULL THEN
    done := redlock.integer(redlock.ended_for(k[5], at));
  END IF;
  SELECT * INTO known FROM redlock.key WHERE id = sha256(k[1]);
  IF known.expires_at <= at THEN
    known := NULL;
  ELSIF known.value <> a[1] THEN
    RETURN redlock.refused(known, at, done);
  END IF;
  IF known.id IS NULL AND redlock.get(k[3], at) IS NOT NULL THEN
    RETURN redlock.list(redlock.integer(-1), redlock.integer(redlock.pttl(k[3], at)), done);
  END IF;
  IF known.id IS NOT NULL THEN
    PERFORM redlock.prolong(k[1], ttl, at);
  ELSIF NOT redlock.take_over(k[1], a[1], ttl, at) THEN
    SELECT * INTO known FROM redlock.key WHERE id = sha256(k[1]);
    RETURN redlock.refused(known, at, done);
  END IF;
  IF a[3] = '' THEN
    RETURN CASE WHEN done IS NULL THEN redlock.integer(1)
      ELSE redlock.list(redlock.integer(1), redlock.integer(0), done) END;
  END IF;
  token := CASE WHEN known.id IS NULL THEN redlock.raise_fence(k[4], 1, redlock.number(a[3]))
    ELSE redlock.fence_of(redlock.get(k[4], at)) END;
  IF token IS NULL THEN
    RAISE EXCEPTION 'FENCE is not a number';
  ELSIF token > 9007199254740990 AND known.id IS NULL THEN
    RAISE EXCEPTION 'FENCE exhausted';
  END IF;
  RETURN redlock.list(redlock.integer(1), redlock.integer(token), done);
END $$;

CREATE OR REPLACE FUNCTION redlock.permits(base bytea, permits bytea) RETURNS bytea[]
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
  RETURN array[base] || array(
    SELECT base || ('#' || n)::bytea FROM generate_series(1, redlock.number(permits) - 1) AS n
  );
END $$;

-- The permits of a lock, by number; value: NULL if it is free.
CREATE OR REPLACE FUNCTION redlock.holders(names bytea[], at timestamptz)
RETURNS TABLE (permit bigint, name bytea, value bytea, ends timestamptz) LANGUAGE plpgsql AS $$
BEGIN
  RETURN QUERY
  SELECT u.n - 1, u.name, k.value, k.expires_at
  FROM unnest(names) WITH ORDINALITY AS u (name, n)
  LEFT JOIN redlock.key k
    ON k.id = sha256(u.name) AND (k.expires_at IS NULL OR k.expires_at > holders.at)
  ORDER BY u.n;
END $$;

CREATE OR REPLACE FUNCTION redlock."permit"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(k[1]);
  names bytea[] := redlock.permits(k[1], a[3]);
  asked bigint := redlock.number(a[5]);
  first bigint := redlock.number(a[4]);
  permits int := cardinality(names);
  done bytea;
  view text := '';
  ours bigint;
  hold bigint;
  free bigint;
  known redlock.key;
  one record;
BEGIN
  PERFORM redlock.note_server(k[2], k[3], a[6], a[7], at);
  IF k[4] IS NOT NULL THEN
    done := redlock.integer(redlock.ended_for(k[4], at));
  END IF;
  FOR one IN SELECT * FROM redlock.holders(names, at) LOOP
    view := view || CASE WHEN one.value <> a[1] THEN
      coalesce(substring(redlock.text_of(one.value) from '^!?([1-9a-z])'), '1') ELSE '0' END;
    IF left(redlock.text_of(a[1]), 1) <> '!' AND left(redlock.text_of(one.value), 1) = '!' THEN
      hold := coalesce(hold, one.permit);
    END IF;
    IF one.value = a[1] AND one.permit = coalesce(asked, one.permit) THEN
      ours := coalesce(ours, one.permit);
    ELSIF one.value = a[1] THEN
      PERFORM redlock.del(one.name, at);
    END IF;
  END LOOP;
  IF ours IS NOT NULL THEN
    PERFORM redlock.prolong(names[ours + 1], redlock.number(a[2]), at);
    RETURN redlock.list(
      redlock.integer(1), redlock.integer(ours), redlock.bulk(view::bytea), done);
  END IF;
  IF hold IS NOT NULL THEN
    view := repeat('1', permits);
  END IF;
  FOR step IN 0 .. CASE WHEN asked IS NULL AND hold IS NULL THEN permits - 1 ELSE 0 END LOOP
    free := coalesce(hold, asked, (first + step) % permits);
    IF substr(view, free::int + 1, 1) = '0' THEN
      IF redlock.get(k[3], at) IS NOT NULL THEN
        RETURN redlock.list(redlock.integer(-1), redlock.integer(redlock.pttl(k[3], at)), done);
      ELSIF redlock.take_over(names[free + 1], a[1], redlock.number(a[2]), at) THEN
        RETURN redlock.list(
          redlock.integer(1), redlock.integer(free), redlock.bulk(view::bytea), done);
      END IF;
      view := overlay(view PLACING '1' FROM free::int + 1);  -- a transaction has confirmed it
    END IF;
  END LOOP;
  SELECT l.* INTO known
  FROM unnest(names) WITH ORDINALITY AS u (name, n) LEFT JOIN redlock.key l ON l.id = sha256(u.name)
  WHERE n - 1 = coalesce(hold, asked, n - 1) ORDER BY l.expires_at NULLS LAST, n LIMIT 1;
  RETURN redlock.refused(known, at, redlock.bulk(view::bytea), done);
END $$;

-- Name the first waiters, each on its own channel; a waiter whose channel nobody hears is dead.
CREATE OR REPLACE FUNCTION redlock.announce(waiting bytea, inbox bytea, value bytea, at timestamptz)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  id text := substring(redlock.text_of(value) FROM '^[^: ]*');
  rank int := 0;
  dead int := 0;
  waiter bytea;
BEGIN
  FOR waiter IN SELECT field FROM redlock.items(waiting, at) LIMIT 103 LOOP
    EXIT WHEN rank = 3 OR dead > 100;
    IF redlock.publish(inbox || waiter, (rank || ' ' || id || ' ')::bytea || waiting) = 1 THEN
      rank := rank + 1;
    ELSE
      PERFORM redlock.remove(waiting, waiter);
      dead := dead + 1;
    END IF;
  END LOOP;
END $$;

-- A release that a crash forgets costs its ttl alone, and one commit waits for no disk.
CREATE OR REPLACE FUNCTION redlock."release"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(k[1]);
  ids bytea[] := array[sha256(k[1])];
BEGIN
  PERFORM set_config('synchronous_commit', CASE WHEN k[3] IS NULL THEN 'off' ELSE 'on' END, true);
  IF k[3] IS NOT NULL THEN
    PERFORM redlock.put(k[3], a[4], redlock.number(a[5]), at);
  END IF;
  IF a[3] <> '1' THEN
    ids := array(SELECT sha256(n) FROM unnest(redlock.permits(k[1], a[3])) AS n);
  END IF;
  DELETE FROM redlock.key WHERE id = ANY (array(
    SELECT k.id FROM redlock.key k
    WHERE k.id = ANY (ids) AND k.value = a[1] AND (k.expires_at IS NULL OR k.expires_at > at)
    FOR UPDATE SKIP LOCKED));
  IF NOT FOUND THEN  -- 2: a transaction has confirmed it. All calls behind this one would wait, too
    RETURN redlock.integer(2 * EXISTS (SELECT FROM redlock.key
      WHERE id = ANY (ids) AND value = a[1] AND (expires_at IS NULL OR expires_at > at))::int);
  END IF;
  IF a[2] <> '' AND EXISTS (SELECT FROM redlock.key WHERE id = sha256(k[2])) THEN
    PERFORM redlock.announce(k[2], a[2], a[1], at);
  END IF;
  RETURN redlock.integer(1);
END $$;

CREATE OR REPLACE FUNCTION redlock."break"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE at timestamptz := redlock.turn_of_permit(k[1]);
BEGIN
  PERFORM redlock.put(k[2], a[1], redlock.number(a[2]), at);
  IF redlock.get(k[1], at) IS DISTINCT FROM a[1] THEN
    RETURN redlock.integer(0);
  END IF;
  PERFORM redlock.del(k[1], at);
  PERFORM redlock.announce(k[3], a[3], a[1], at);
  RETURN redlock.integer(1);
END $$;

-- Set a key that is missing, unless an operator broke its lock; return whether it is ours.
CREATE OR REPLACE FUNCTION redlock.reclaim(k bytea[], a bytea[]) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE at timestamptz := redlock.turn_of_permit(k[1]);
BEGIN
  IF redlock.get(k[3], at) = a[1] OR redlock.get(k[1], at) <> a[1] THEN
    RETURN false;
  END IF;
  RETURN redlock.take_over(k[1], a[1], redlock.number(a[2]), at)
    OR redlock.get(k[1], at) IS NOT DISTINCT FROM a[1];
END $$;

-- By their values alone, without turns: a renewal waits only for who changes the same row.
CREATE OR REPLACE FUNCTION redlock."renew"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.begin_call();
  keys int := cardinality(a) / 3;
  done boolean[];
  replies bytea[] := '{}';
  token bigint := redlock.fence_of(redlock.get(k[keys + 1], at));
  most bigint := token;
BEGIN
  WITH asked AS (
    SELECT n, sha256(k[n]) AS id, a[3 * n - 2] AS value, redlock.number(a[3 * n - 1]) AS ms
    FROM generate_series(1, keys) AS n
  ), ours AS (  -- in one order: two renewals never wait for each other
    SELECT n, l.id, ms FROM redlock.key l JOIN asked ON l.id = asked.id AND l.value = asked.value
    WHERE l.expires_at IS NULL OR l.expires_at > at
    ORDER BY l.id FOR NO KEY UPDATE OF l SKIP LOCKED
  ), renewed AS (
    UPDATE redlock.key l SET expires_at = greatest(l.expires_at, redlock.after(at, ours.ms))
    FROM ours WHERE l.id = ours.id RETURNING n
  )
  SELECT array_agg(renewed.n IS NOT NULL ORDER BY n) INTO done
  FROM asked LEFT JOIN renewed USING (n);
  IF NOT done[1] AND keys = 1 AND k[3] IS NOT NULL AND redlock.get(k[1], at) IS NULL THEN
    done[1] := redlock.reclaim(k, a);
  END IF;
  FOR n IN 1 .. keys LOOP
    IF NOT done[n] AND redlock.get(k[n], at) = a[3 * n - 2] THEN
      replies := replies || redlock.bulk(NULL);  -- another transaction has its row: no vote
    ELSIF NOT done[n] THEN
      replies := replies || redlock.integer(-coalesce(redlock.get(k[n], at) <> a[3 * n - 2]
        OR keys = 1 AND redlock.get(k[3], at) = a[1], false)::int);
    ELSIF a[3 * n] = '' THEN
      replies := replies || redlock.integer(1);
    ELSE
      most := greatest(most, redlock.number(a[3 * n]));
      replies := replies || redlock.list(
        redlock.integer(1), redlock.integer(CASE WHEN token IS NULL THEN 0 ELSE most END));
    END IF;
  END LOOP;
  IF most > token THEN
    PERFORM redlock.raise_fence(k[keys + 1], 0, most);
  END IF;
  RETURN redlock.list(VARIADIC replies);
END $$;

CREATE OR REPLACE FUNCTION redlock."fence"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(k[1]);
  counter bigint := redlock.fence_of(redlock.get(k[1], at));
BEGIN
  counter := CASE WHEN counter <= 9007199254740990 THEN counter ELSE -1 END;
  IF a[1] IS NOT NULL AND (counter < 0 OR counter > redlock.number(a[2])) THEN
    PERFORM redlock.put(k[1], a[1], NULL, at);
  END IF;
  RETURN redlock.integer(counter);
END $$;

-- Tenures: since (ms), a space, run id

CREATE OR REPLACE FUNCTION redlock.tenure(text bytea) RETURNS text LANGUAGE sql STABLE
RETURN CASE WHEN length(text) <= 100
    AND encode(text, 'escape') ~ '^\d{1,14} [^[:space:]]+$' THEN encode(text, 'escape') ELSE '' END;

CREATE OR REPLACE FUNCTION redlock.recorded(name bytea, at timestamptz) RETURNS text LANGUAGE sql
RETURN redlock.tenure(coalesce(redlock.get(name, at), ''));

CREATE OR REPLACE FUNCTION redlock.since(tenure text) RETURNS bigint LANGUAGE sql STABLE
RETURN coalesce(nullif(split_part(tenure, ' ', 1), '')::bigint, 0);

CREATE OR REPLACE FUNCTION redlock."guard"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(k[1]);
  now bigint := redlock.ms(at);
  run text := redlock.run_id(redlock.text_of(a[1]));
  known text := coalesce(redlock.text_of(redlock.get(k[1], at)), '');
  before text := redlock.recorded(k[3], at);
  elsewhere text := redlock.tenure(a[3]);
  own text := before;
  ms bigint;
  replies bytea[];
  note text;
  told text;
BEGIN
  PERFORM redlock.sweep();
  IF split_part(own, ' ', 2) <> run THEN
    own := '0 ' || run;
  END IF;
  IF split_part(elsewhere, ' ', 2) = run AND redlock.since(elsewhere) > redlock.since(own) THEN
    own := elsewhere;
  END IF;
  IF known <> run THEN
    ms := redlock.number(a[2]);
  ELSIF elsewhere <> '' AND split_part(elsewhere, ' ', 2) <> run
      AND redlock.since(elsewhere) >= redlock.since(own) THEN
    ms := redlock.number(a[2]);
  ELSIF before <> '' AND split_part(before, ' ', 2) <> run AND redlock.since(own) = 0 THEN
    ms := 0;
  END IF;
  IF ms IS NOT NULL THEN
    own := greatest(now, redlock.since(before) + 1, redlock.since(elsewhere) + 1) || ' ' || run;
    IF ms > 0 AND ms > redlock.pttl(k[2], at) THEN
      PERFORM redlock.put(k[2], '1', ms, at);
    END IF;
    PERFORM redlock.put(k[1], run::bytea, NULL, at);
  END IF;
  IF own <> before THEN
    PERFORM redlock.put(k[3], own::bytea, NULL, at);
  END IF;
  replies := array[
    redlock.integer(greatest(0, redlock.pttl(k[2], at))), redlock.bulk(own::bytea)];
  FOR i IN 4 .. cardinality(k) LOOP  -- a node of another set knows others: none has one PostgreSQL
    note := redlock.recorded(k[i], at);
    told := redlock.tenure(a[i + 1]);
    IF told <> '' AND (note IN ('', told) OR redlock.since(note) > now
        OR redlock.since(told) > redlock.since(note)) THEN
      PERFORM redlock.put(k[i], told::bytea, redlock.number(a[4]), at);
      note := told;
    END IF;
    replies := replies || redlock.bulk(
      CASE WHEN redlock.since(note) > now THEN '' ELSE note END::bytea);
  END LOOP;
  RETURN redlock.list(VARIADIC replies);
END $$;

CREATE OR REPLACE FUNCTION redlock."trust"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(k[1]);
  now bigint := redlock.ms(at);
  run text := redlock.run_id(redlock.text_of(a[1]));
  note text;
BEGIN
  PERFORM redlock.put(k[1], run::bytea, NULL, at);
  PERFORM redlock.put(k[3],
    (greatest(redlock.since(redlock.recorded(k[3], at)) + 1, now) || ' ' || run)::bytea, NULL, at);
  FOR i IN 4 .. cardinality(k) LOOP
    note := redlock.recorded(k[i], at);
    IF note = '' OR redlock.since(note) > now THEN
      PERFORM redlock.del(k[i], at);
    END IF;
  END LOOP;
  RETURN redlock.integer(redlock.del(k[2], at));
END $$;

-- The starts of a rate: see starts.lua

CREATE OR REPLACE FUNCTION redlock.counted(taken bytea, now bigint, kept bigint, at timestamptz)
RETURNS SETOF redlock.item LANGUAGE plpgsql AS $$
BEGIN
  RETURN QUERY
  SELECT * FROM redlock.items(taken, at) AS i WHERE i.score > now - kept;
END $$;

CREATE OR REPLACE FUNCTION redlock.store(taken bytea, tokens bytea, kept bigint, at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM redlock.expire(taken, greatest(kept, redlock.pttl(taken, at)), at);
  PERFORM redlock.expire(tokens, greatest(kept, redlock.pttl(tokens, at)), at);
END $$;

-- Let a permit have the start that it had before it was taken, if there is one.
CREATE OR REPLACE FUNCTION redlock.forget(taken bytea, tokens bytea, permit bytea, at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  before text := redlock.text_of((redlock.item_of(tokens, 'before:' || permit, at)).value);
BEGIN
  PERFORM redlock.remove(tokens, permit, 'before:' || permit);
  PERFORM redlock.remove(taken, permit);
  IF before IS NOT NULL THEN
    PERFORM redlock.add(taken, permit, split_part(before, ' ', 1)::float8, NULL, at);
    PERFORM redlock.add(tokens, permit, NULL, split_part(before, ' ', 2)::bytea, at);
  END IF;
END $$;

-- Forget the permits that have a token, but for one; return whether that one has it.
CREATE OR REPLACE FUNCTION redlock.search(
  taken bytea, tokens bytea, token bytea, but bytea, at timestamptz) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  found_it boolean := false;
  permit bytea;
BEGIN
  FOR permit IN SELECT i.field FROM redlock.items(tokens, at) AS i WHERE i.value = token LOOP
    IF permit = but THEN
      found_it := true;
    ELSE
      PERFORM redlock.forget(taken, tokens, permit, at);
    END IF;
  END LOOP;
  RETURN found_it;
END $$;

CREATE OR REPLACE FUNCTION redlock."take"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(k[1]);
  now bigint := redlock.ms(at);
  permits int := substring(redlock.text_of(a[2]) FROM '^\d+')::int;
  kept bigint := redlock.number(a[3]);
  own text;
  young bytea;
  ours bytea;
  chosen bytea;
  view text := repeat('0', permits);
  ends bigint;
  one redlock.item;
BEGIN
  PERFORM redlock.note_server(k[3], k[4], a[7], a[8], at);
  own := redlock.recorded(k[5], at);
  young := redlock.integer((a[7] <> '' AND (own = '' OR now - redlock.since(own) < kept))::int);
  -- the clock was set back
  UPDATE redlock.item SET score = now WHERE id = sha256(k[1]) AND score > now;
  IF a[5] <> '' THEN
    ours := CASE WHEN redlock.search(k[1], k[2], a[1], a[5], at) THEN a[5] END;
  ELSIF a[6] = '1' THEN
    ours := (SELECT i.field FROM redlock.items(k[2], at) AS i WHERE i.value = a[1] LIMIT 1);
  END IF;
  FOR one IN SELECT * FROM redlock.counted(k[1], now, kept, at) LOOP
    IF redlock.number(one.field) < permits AND one.field IS DISTINCT FROM ours THEN
      view := overlay(view PLACING '1' FROM redlock.number(one.field)::int + 1);
      IF ends IS NULL AND (a[5] = '' OR a[5] = one.field) THEN
        ends := one.score + kept - now;
      END IF;
    END IF;
  END LOOP;
  chosen := coalesce(ours, (
    SELECT permit::text::bytea
    FROM (SELECT step, (redlock.number(a[4]) + step) % permits AS permit
          FROM generate_series(0, permits - 1) AS step) AS steps
    WHERE substr(view, permit::int + 1, 1) = '0' AND (a[5] = '' OR permit = redlock.number(a[5]))
    ORDER BY step LIMIT 1
  ));
  IF chosen IS NULL THEN
    RETURN redlock.list(redlock.integer(0), redlock.integer(coalesce(ends, 0)),
      redlock.bulk(view::bytea), young);
  END IF;
  IF ours IS NULL THEN
    -- if clients with a longer period still count its last start, that is kept beside it
    IF (redlock.item_of(k[1], chosen, at)).score IS NOT NULL AND redlock.pttl(k[1], at) > kept THEN
      PERFORM redlock.add(k[2], 'before:' || chosen, NULL,
        ((redlock.item_of(k[1], chosen, at)).score || ' '
        || coalesce(redlock.text_of((redlock.item_of(k[2], chosen, at)).value), ''))::bytea, at);
    ELSE
      PERFORM redlock.remove(k[2], 'before:' || chosen);
    END IF;
    PERFORM redlock.add(k[2], chosen, NULL, a[1], at);
  END IF;
  PERFORM redlock.add(k[1], chosen, now, NULL, at);
  PERFORM redlock.add(k[2], 'rate', NULL, a[3] || ' ' || a[2], at);
  PERFORM redlock.store(k[1], k[2], kept, at);
  IF redlock.get(k[4], at) IS NOT NULL THEN
    RETURN redlock.list(redlock.integer(-1), redlock.integer(redlock.pttl(k[4], at)));
  END IF;
  RETURN redlock.list(redlock.integer(1), redlock.integer(redlock.number(chosen)),
    redlock.bulk(view::bytea), young);
END $$;

CREATE OR REPLACE FUNCTION redlock."cancel"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(k[1]);
  counted bigint := 0;
  permit bytea;
  own bytea := CASE WHEN (redlock.item_of(k[2], a[2], at)).value = a[1] THEN a[2] END;
BEGIN
  FOR permit IN
    SELECT i.field FROM redlock.items(k[2], at) AS i
    WHERE CASE WHEN a[1] = '' THEN redlock.text_of(i.field) ~ '^\d+$'
      ELSE i.value = a[1] AND i.field = coalesce(own, i.field) END
  LOOP
    counted := counted
      + coalesce((redlock.ms(at) - (redlock.item_of(k[1], permit, at)).score < redlock.number(a[4]))::int, 0);
    PERFORM redlock.forget(k[1], k[2], permit, at);
  END LOOP;
  IF counted > 0 THEN
    PERFORM redlock.announce(k[3], a[3], CASE WHEN a[1] <> '' THEN a[1] ELSE a[2] END, at);
  END IF;
  RETURN redlock.integer(counted);
END $$;

CREATE OR REPLACE FUNCTION redlock."record"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE at timestamptz := redlock.turn(k[1]);
BEGIN
  PERFORM redlock.search(k[1], k[2], a[1], a[2], at);
  PERFORM redlock.add(k[1], a[2], greatest(
    redlock.ms(at) - redlock.number(a[4]), (redlock.item_of(k[1], a[2], at)).score), NULL, at);
  PERFORM redlock.add(k[2], a[2], NULL, a[1], at);
  PERFORM redlock.store(k[1], k[2], redlock.number(a[3]), at);
  RETURN redlock.integer(1);
END $$;

-- ms until the permit is free that those before leave to a waiter; -1 if that does not expire
CREATE OR REPLACE FUNCTION redlock.free_in(rank bigint, free bigint, ends float8[], kept bigint) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
  permits bigint := free + cardinality(ends);
  ms float8;
BEGIN
  IF rank < free OR cardinality(ends) = 0 THEN
    RETURN 0;
  ELSIF kept IS NOT NULL THEN
    ms := CASE WHEN rank % permits < free THEN 0 ELSE ends[rank % permits - free + 1] END;
    RETURN ms + rank / permits * kept;
  END IF;
  ms := ends[least(rank - free + 1, cardinality(ends))];
  RETURN CASE WHEN ms = 'infinity' THEN -1 ELSE ms END;
END $$;

CREATE OR REPLACE FUNCTION redlock."register"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(coalesce(k[2], k[1]));
  since float8 := redlock.text_of(a[2])::float8;
  permits bigint := redlock.number(a[6]);
  kept bigint := redlock.number(a[7]);
  now bigint := redlock.ms(at);
  ends float8[] := '{}';  -- ms until each permit is free that is not free now
  hold float8;
  free bigint;
  rank bigint;
  waiters bytea[];
  one record;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);  -- a waiter registers again
  PERFORM redlock.add(k[1], a[1], since, NULL, at);
  PERFORM redlock.expire(k[1], redlock.number(a[3]), at);
  IF k[2] IS NULL THEN
    RETURN redlock.integer(0);
  END IF;
  IF kept IS NULL THEN
    FOR one IN
      SELECT h.value, CASE WHEN h.ends IS NULL THEN 'infinity'
        ELSE greatest(1, redlock.ms(h.ends) - now)::float8 END AS left_ms
      FROM redlock.holders(redlock.permits(k[2], a[6]), at) AS h WHERE h.value IS NOT NULL
    LOOP
      ends := ends || one.left_ms;
      IF permits > 1 AND since > 0 AND left(redlock.text_of(one.value), 1) = '!' THEN
        hold := one.left_ms;
      END IF;
    END LOOP;
  ELSE
    ends := array(
      SELECT least(i.score + kept - now, kept) FROM redlock.counted(k[2], now, kept, at) AS i
      WHERE redlock.number(i.field) < permits);
  END IF;
  free := permits - cardinality(ends);
  IF free > 0 AND hold IS NOT NULL THEN
    free := 0;
    ends := array[hold];
  END IF;
  ends := array(SELECT e FROM unnest(ends) AS e ORDER BY e);
  waiters := array(SELECT i.field FROM redlock.items(k[1], at) AS i);
  rank := array_position(waiters, a[1]) - 1;
  IF free > 0 AND rank > 0 THEN
    FOR place IN 1 .. least(rank, 100) LOOP
      IF place <= redlock.number(a[4]) OR NOT redlock.is_heard(a[5] || waiters[place]) THEN
        PERFORM redlock.remove(k[1], waiters[place]);
        rank := rank - 1;
      END IF;
    END LOOP;
  END IF;
  RETURN redlock.list(redlock.integer(rank), redlock.integer(free),
    redlock.integer(redlock.free_in(rank, free, ends, kept)));
END $$;

-- A claim: "value first ends", and in a second line the one that an unconfirmed one replaced.
CREATE OR REPLACE FUNCTION redlock."unique"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(k[1]);
  now bigint := redlock.ms(at);
  current text := redlock.text_of(redlock.get(k[1], at));
  line text := split_part(current, E'\n', 1);
  replaced text := substr(current, length(line) + 2);
  parts text[] := regexp_match(line, '^(.*) (\d+) (\d+)$');
  value text := coalesce(parts[1], line);
  first bigint := parts[2]::bigint;
  ends bigint := parts[3]::bigint;
  expected text := redlock.text_of(a[1]);
  wanted text := redlock.text_of(a[2]);
  ms text := redlock.text_of(a[3]);
  stored text;
  kept bigint := 0;
BEGIN
  IF value = wanted THEN
    RETURN redlock.integer(1);
  ELSIF current IS NULL AND expected <> '' THEN
    RETURN redlock.integer(0);
  ELSIF current IS NOT NULL AND (expected = '' OR NOT starts_with(value, expected)) THEN
    RETURN redlock.list(redlock.integer(redlock.pttl(k[1], at)),
      redlock.bulk(decode(value, 'escape')),
      redlock.integer(greatest(0, now - coalesce(first, now))));
  END IF;
  IF wanted <> '' THEN
    ends := CASE WHEN ms <> '' THEN now + ms::bigint ELSE coalesce(ends, now) END;
    kept := CASE WHEN ms <> '' THEN least(ms::bigint, redlock.number(a[4])) ELSE ends - now END;
    stored := concat_ws(' ', wanted, coalesce(first, now), ends)
      || CASE WHEN ms <> '' AND current IS NOT NULL THEN E'\n' || line ELSE '' END;
  ELSIF ms = 'back' AND replaced <> '' THEN
    stored := replaced;
    kept := substring(replaced FROM '\d+$')::bigint - now;
  END IF;
  IF kept < 1 THEN
    PERFORM redlock.del(k[1], at);
  ELSE
    PERFORM redlock.put(k[1], decode(stored, 'escape'), kept, at);
  END IF;
  RETURN redlock.integer(1);
END $$;

-- What is queued of a resource, in lines as of a claim with a number each, and the order of its sends
-- and starts: "largest started id", and "low replaced latest stays before later". The lines are arrays
-- here, the newest first.
CREATE OR REPLACE FUNCTION redlock."newest"(k bytea[], a bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := redlock.turn(k[1]);
  now bigint := redlock.ms(at);
  w text[] := array(SELECT redlock.text_of(u.word) FROM unnest(a) WITH ORDINALITY AS u(word, n) ORDER BY n);
  what text := w[1];
  token text := w[2];
  pttl bigint := redlock.pttl(k[1], at);
  latest bigint := now + CASE WHEN pttl < 0 THEN 1::bigint << 40 ELSE pttl + 10 END;
  sent text := '^[^:]*:sent:.';
  vals text[] := '{}';
  numbers bigint[] := '{}';
  began bigint[] := '{}';
  ends bigint[] := '{}';
  line text;
  parts text[];
  numbered text[];
  stored text := redlock.text_of(redlock.get(k[2], at));
  ordered text[] := regexp_match(stored, '^(\d+) (\d+) ([^\n]*)');
  largest bigint := coalesce(ordered[1]::bigint, 0);
  started bigint := coalesce(ordered[2]::bigint, 0);
  id text := coalesce(ordered[3], '');
  taken text[] := regexp_match(stored, '\n(\d+) (\d+) (\d+) (\d+) (\d+) (.*)$');
  low bigint := coalesce(taken[1]::bigint, 0);
  replaced bigint := coalesce(taken[2]::bigint, 0);
  latest_sent bigint := coalesce(taken[3]::bigint, 0);
  stays bigint := coalesce(taken[4]::bigint, 0);
  before bigint := coalesce(taken[5]::bigint, 0);
  later text := coalesce(taken[6], '');
  number bigint := 0;
  last int;
  kept int[] := '{}';  -- the places of the lines that stay
BEGIN
  FOREACH line IN ARRAY string_to_array(coalesce(redlock.text_of(redlock.get(k[1], at)), ''), E'\n') LOOP
    parts := regexp_match(line, '^(.*) (\d+) (\d+)$');
    numbered := regexp_match(parts[1], '^(.*) (\d+)$');
    IF line <> '' AND least(coalesce(parts[3]::bigint, latest), latest) > now THEN
      vals := vals || coalesce(numbered[1], parts[1], line);
      numbers := numbers || coalesce(numbered[2]::bigint, 0);
      began := began || coalesce(parts[2]::bigint, now);
      ends := ends || least(coalesce(parts[3]::bigint, latest), latest);
    END IF;
  END LOOP;
  last := cardinality(vals);
  IF what = 'send' THEN
    IF w[3] <> '' THEN
      IF vals[1] = w[3] THEN
        RETURN redlock.integer(1);
      ELSIF vals[1] IS NOT NULL AND NOT (vals[1] ~ sent AND token <> ''
        AND (starts_with(vals[1], token) OR numbers[1] < w[7]::bigint)) THEN
        RETURN redlock.list(redlock.integer(pttl), redlock.bulk(decode(vals[1], 'escape')),
          redlock.integer(CASE WHEN vals[2] IS NULL THEN greatest(0, now - began[1]) ELSE 0 END),
          redlock.integer(numbers[1]), redlock.bulk(decode(coalesce(vals[2], ''), 'escape')),
          redlock.integer(coalesce(numbers[2], 0)));
      ELSIF vals[1] IS NULL AND token <> '' THEN
        RETURN redlock.integer(0);
      END IF;
    END IF;
    IF w[4]::bigint <= largest THEN
      RETURN redlock.integer(-largest);
    END IF;
    largest := w[4]::bigint;
    PERFORM redlock.keep_order(k[2], largest, started, id,
      array[low, replaced, latest_sent, stays, before], later, w[6]::bigint, at);
    IF w[3] = '' THEN
      RETURN redlock.integer(1);
    END IF;
    vals := w[3] || vals;
    numbers := w[4]::bigint || numbers;
    began := now || began;
    ends := now + w[5]::bigint || ends;
    kept := array(SELECT generate_series(1, last + 1));
  ELSIF what = 'sent' THEN
    IF vals[1] IS NULL OR NOT starts_with(vals[1], token) THEN
      RETURN redlock.integer(0);
    ELSIF vals[1] ~ sent THEN
      RETURN redlock.integer(1);
    END IF;
    vals[1] := w[3];
    ends[1] := began[1] + w[4]::bigint;
    began[1] := began[1] - w[5]::bigint;
    kept := '{1}';
    FOR place IN 2..last LOOP
      IF w[6] <> '' AND starts_with(vals[place], w[6]) THEN
        began[1] := least(began[1], began[place]);
      ELSIF w[8] <> '' AND starts_with(vals[place], w[8]) THEN
        kept := array[1, place];
        ends[place] := greatest(ends[place], least(ends[1], began[place] + w[10]::bigint));
      END IF;
    END LOOP;
    IF greatest(w[7]::bigint, w[9]::bigint) = 0 THEN
      before := latest_sent;
    ELSE
      IF latest_sent <> coalesce(nullif(w[7]::bigint, 0), w[9]::bigint) THEN
        low := latest_sent;
      ELSIF stays > started AND stays <> w[9]::bigint THEN
        low := stays;
      END IF;
      low := greatest(low, before);
      stays := w[9]::bigint;
      IF w[7]::bigint > 0 THEN
        replaced := w[7]::bigint;
        later := split_part(w[3], ':', 3);
      END IF;
    END IF;
    PERFORM redlock.keep_order(k[2], largest, started, id,
      array[low, replaced, numbers[1], stays, before], later, w[4]::bigint, at);
  ELSE
    IF what = 'start' THEN
      number := w[3]::bigint;
      IF started > number THEN
        RETURN redlock.list(redlock.integer(started), redlock.bulk(decode(id, 'escape')));
      ELSIF w[6] IS DISTINCT FROM 'anyway' AND number > low AND number <= replaced
        AND number NOT IN (stays, started) THEN
        RETURN redlock.list(redlock.integer(-replaced), redlock.bulk(decode(later, 'escape')));
      END IF;
      PERFORM redlock.keep_order(k[2], greatest(largest, number), number, w[4],
        array[low, replaced, latest_sent, stays, before], later, w[5]::bigint, at);
    END IF;
    FOR place IN 1..last LOOP
      IF NOT starts_with(vals[place], token) AND (what = 'end' OR numbers[place] > number) THEN
        kept := kept || place;
      END IF;
    END LOOP;
    IF cardinality(kept) = last THEN
      RETURN redlock.integer(1);
    ELSIF cardinality(kept) > 0 AND kept[cardinality(kept)] < last THEN
      began[kept[cardinality(kept)]] := now;
    END IF;
  END IF;
  IF coalesce((SELECT max(ends[p]) FROM unnest(kept) AS p), 0) - now < 1 THEN
    PERFORM redlock.del(k[1], at);
  ELSE
    PERFORM redlock.put(k[1], decode((SELECT string_agg(
      concat_ws(' ', vals[p], numbers[p], began[p], ends[p]), E'\n' ORDER BY n)
      FROM unnest(kept) WITH ORDINALITY AS u(p, n)), 'escape'),
      (SELECT max(ends[p]) FROM unnest(kept) AS p) - now, at);
  END IF;
  RETURN redlock.integer(1);
END $$;

CREATE OR REPLACE FUNCTION redlock.keep_order(
  name bytea, largest bigint, started bigint, id text, taken bigint[], later text, ms bigint,
  at timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM redlock.put(name, decode(concat_ws(' ', largest, started, id)
    || CASE WHEN taken[3] > 0 THEN concat_ws(' ', E'\n' || array_to_string(taken, ' '), later)
      ELSE '' END, 'escape'), greatest(ms, redlock.pttl(name, at)), at);
END $$;

-- What is no script

-- Delete what expired a minute ago, once a minute. In parts, in the order of their ids: a PING that
-- takes longer than the node timeout would cost its client the connection. A call does parts for a
-- quarter of that, and the next call goes on there. Rows of locks stay for an hour, because
-- `take_over` refuses a lock whose row is locked here.
CREATE OR REPLACE FUNCTION redlock.sweep() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  most int := 500;  -- rows of a part
  due timestamptz := clock_timestamp() - interval '1 minute';
  until timestamptz := clock_timestamp() + current_setting('lock_timeout')::interval / 2;
  last bytea;
  ids bytea[];
BEGIN
  SELECT s.after INTO last FROM redlock.swept s WHERE s.at < due FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  LOOP
    SELECT (array_agg(id ORDER BY id))[most], array_agg(id) FILTER (WHERE expires_at < due
      - CASE WHEN position('}:lock:'::bytea IN name) > 0 THEN interval '1 hour' ELSE '0' END)
    INTO last, ids
    FROM (SELECT * FROM redlock.key WHERE id > last ORDER BY id LIMIT most) AS part;
    ids := array(SELECT k.id FROM redlock.key k
      WHERE k.id = ANY (ids) AND k.expires_at < due FOR UPDATE SKIP LOCKED);
    DELETE FROM redlock.key WHERE id = ANY (ids);
    DELETE FROM redlock.item WHERE id = ANY (ids);
    EXIT WHEN last IS NULL OR clock_timestamp() > until;
  END LOOP;
  UPDATE redlock.swept s SET after = coalesce(last, ''),
    at = CASE WHEN last IS NULL THEN clock_timestamp() ELSE '-infinity' END;
END $$;

CREATE OR REPLACE FUNCTION redlock.info() RETURNS bytea LANGUAGE sql
RETURN redlock.bulk(redlock.word(concat_ws(E'\r\n',
  'server_name:postgresql',
  'redis_version:' || split_part(current_setting('server_version'), ' ', 1),
  'run_id:' || redlock.run_id(),
  'role:master',
  'maxmemory:0',
  'server_time_usec:' || floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
  'uptime_in_seconds:'
    || floor(extract(epoch FROM clock_timestamp() - pg_postmaster_start_time()))::bigint,
  '')));

-- Names that begin as a pattern before its "*", in the order of their ids, from a cursor on.
CREATE OR REPLACE FUNCTION redlock.scan(cursor text, pattern bytea, most bigint) RETURNS bytea
LANGUAGE plpgsql AS $$
DECLARE
  beginning bytea := decode(
    regexp_replace(encode(pattern, 'hex'), '^(.*)2a$', '\1'), 'hex');
  names bytea[];
  last bytea;
BEGIN
  -- "\x" in a pattern of SCAN is "x"
  beginning := decode(regexp_replace(regexp_replace(encode(beginning, 'hex'), '(..)', '\1 ', 'g'),
    '5c (..) ', '\1 ', 'g'), 'hex');
  SELECT array_agg(name ORDER BY id), (array_agg(id ORDER BY id DESC))[1] INTO names, last FROM (
    SELECT k.id, k.name FROM redlock.key k
    WHERE k.id > CASE WHEN cursor = '0' THEN ''::bytea ELSE decode(cursor, 'hex') END
      AND substr(k.name, 1, length(beginning)) = beginning
      AND (k.expires_at IS NULL OR k.expires_at > clock_timestamp())
    ORDER BY k.id LIMIT most
  ) AS page;
  RETURN redlock.list(
    redlock.bulk(CASE WHEN cardinality(names) = most THEN encode(last, 'hex') ELSE '0' END::bytea),
    redlock.bulks(coalesce(names, '{}')));
END $$;

CREATE OR REPLACE FUNCTION redlock.command(w bytea[]) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz := clock_timestamp();
  verb text := upper(redlock.text_of(w[1]));
  more bytea[] := w[4:];
  number bigint;
  before bytea;
  done boolean;
BEGIN
  IF verb IN ('SUBSCRIBE', 'ECHO', 'PING') THEN  -- nothing that a crash may not forget
    PERFORM set_config('synchronous_commit', 'off', true);
  END IF;
  CASE verb
  -- [version of the client]. One that names none is of version 3 at most, takes no other one, and is
  -- served: its 'start' of newest has five words.
  WHEN 'HELLO' THEN
    RETURN redlock.bulks(array[CASE WHEN w[2] IS NULL THEN '3' ELSE redlock.version()::text END,
      current_setting('default_transaction_isolation'), pg_backend_pid()::text,
      pg_is_in_recovery()::text, current_setting('standard_conforming_strings'),
      current_setting('client_min_messages')]::bytea[]);
  -- End commits that wait for their standby for longer than their clients, by what their calls begin
  -- with. Only those of a pooler's clients begin so: nothing else would end them.
  WHEN 'ENDWAITS' THEN
    RETURN redlock.integer(count(pg_cancel_backend(pid))) FROM pg_stat_activity
    WHERE wait_event = 'SyncRep' AND usename = session_user AND query_start < clock_timestamp()
      - substring(query, '^/\*(\d{1,9})\*/SELECT')::int * interval '1 millisecond';
  WHEN 'SUBSCRIBE' THEN
    EXECUTE format('LISTEN %I', redlock.channel(w[2]));
    PERFORM pg_advisory_lock_shared(redlock.hash(w[2], 2));
    PERFORM pg_notify(redlock.channel(w[2]), '');  -- to itself: behind a pooler none arrives
    RETURN redlock.word(E'+OK\r\n');
  WHEN 'UNSUBSCRIBE' THEN
    EXECUTE format('UNLISTEN %I', redlock.channel(w[2]));
    PERFORM pg_advisory_unlock_shared(redlock.hash(w[2], 2));
    RETURN redlock.word(E'+OK\r\n');
  WHEN 'ECHO' THEN
    PERFORM pg_notify(redlock.channel(w[2]), 'echo');
    RETURN redlock.bulk(w[2]);
  WHEN 'PING' THEN
    PERFORM redlock.sweep();
    RETURN redlock.word(E'+PONG\r\n');
  WHEN 'INFO' THEN RETURN redlock.info();
  WHEN 'TIME' THEN
    number := floor(extract(epoch FROM at) * 1000000);
    RETURN redlock.bulks(
      array[(number / 1000000)::text::bytea, (number % 1000000)::text::bytea]);
  WHEN 'GET' THEN RETURN redlock.bulk(redlock.get(w[2], at));
  WHEN 'MGET' THEN
    RETURN redlock.bulks(array(SELECT h.value FROM redlock.holders(w[2:], at) AS h));
  WHEN 'EXISTS' THEN
    RETURN redlock.integer((SELECT count(*) FROM unnest(w[2:]) AS n WHERE redlock.pttl(n, at) <> -2));
  WHEN 'PTTL' THEN RETURN redlock.integer(redlock.pttl(w[2], at));
  WHEN 'DEL' THEN
    RETURN redlock.integer((SELECT sum(redlock.del(n, at)) FROM unnest(w[2:]) AS n)::bigint);
  WHEN 'SET' THEN  -- key, value, and PX ms, NX, XX or GET
    at := redlock.turn(w[2]);
    before := redlock.get(w[2], at);
    done := NOT CASE WHEN before IS NULL THEN 'XX' ELSE 'NX' END::bytea = ANY (more);
    IF done THEN
      PERFORM redlock.put(w[2], w[3], redlock.number(w[array_position(w, 'PX') + 1]), at);
    END IF;
    RETURN CASE WHEN 'GET' = ANY (more) THEN redlock.bulk(before)
      WHEN done THEN redlock.word(E'+OK\r\n') ELSE redlock.bulk(NULL) END;
  WHEN 'PEXPIRE' THEN
    PERFORM redlock.expire(w[2], redlock.number(w[3]), at);
    RETURN redlock.integer((redlock.pttl(w[2], at) <> -2)::int);
  WHEN 'SCAN' THEN  -- cursor MATCH pattern COUNT most
    RETURN redlock.scan(redlock.text_of(w[2]), w[4], redlock.number(w[6]));
  WHEN 'ZADD' THEN  -- key XX score member, or key score member
    IF upper(redlock.text_of(w[3])) <> 'XX' THEN
      PERFORM redlock.add(w[2], w[4], redlock.text_of(w[3])::float8, NULL, at);
    ELSE
      UPDATE redlock.item SET score = redlock.text_of(w[4])::float8
      WHERE id = sha256(w[2]) AND field = w[5] AND redlock.pttl(w[2], at) <> -2;
    END IF;
    RETURN redlock.integer(0);
  WHEN 'ZREM', 'HDEL' THEN RETURN redlock.integer(redlock.remove(w[2], VARIADIC w[3:]));
  WHEN 'ZRANGE' THEN  -- key 0 -1 [WITHSCORES]
    RETURN redlock.bulks(array(
      SELECT unnest(CASE WHEN w[5] IS NULL THEN array[i.field]
        ELSE array[i.field, i.score::text::bytea] END) FROM redlock.items(w[2], at) AS i));
  WHEN 'HGET' THEN RETURN redlock.bulk((redlock.item_of(w[2], w[3], at)).value);
  WHEN 'HGETALL' THEN
    RETURN redlock.bulks(array(
      SELECT unnest(array[i.field, i.value]) FROM redlock.items(w[2], at) AS i));
  WHEN 'PUBLISH' THEN RETURN redlock.integer(redlock.publish(w[2], w[3]));
  WHEN 'PUBSUB' THEN  -- NUMSUB channel...
    RETURN redlock.list(VARIADIC array(
      SELECT unnest(array[redlock.bulk(c), redlock.integer(redlock.is_heard(c)::int)])
      FROM unnest(w[3:]) AS c));
  ELSE
    RETURN redlock.word('-ERR unknown command ' || quote_literal(verb) || E'\r\n');
  END CASE;
END $$;

-- Before version 2 a run id was the cluster and the timeline. A record of this very server gets its new
-- run id, because the server has forgotten nothing. Its tenure is newer than what clients have noted.
-- Versions 3 and 4 have new functions, and rows as version 2: a move from those changes none here.
DO $$
DECLARE
  now text := redlock.run_id();
  before text := split_part(now, '-', 1) || '-' || split_part(now, '-', 4);
BEGIN
  IF current_setting('redlock.setup') = 'moved' THEN
    UPDATE redlock.key SET value = now::bytea
    WHERE value = before::bytea AND encode(name, 'escape') ~ '}:run$';
    UPDATE redlock.key SET value = (redlock.since(encode(value, 'escape')) + 1 || ' ' || now)::bytea
    WHERE split_part(redlock.tenure(value), ' ', 2) = before AND encode(name, 'escape') ~ '}:tenure$';
  END IF;
END $$;

RESET search_path;
