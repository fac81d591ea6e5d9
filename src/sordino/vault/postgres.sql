-- A vault in PostgreSQL. Nobody writes a table: entries are added by one function, which looks who is asking, prices
-- nothing but adds up, computes the chain and signs. Rows are seen by those who have to do with the dataset.

CREATE SCHEMA sordino;
REVOKE ALL ON SCHEMA sordino FROM PUBLIC;

DO $$
DECLARE role text;
BEGIN
    FOREACH role IN ARRAY ARRAY['sordino_owner', 'sordino_trainer', 'sordino_auditor'] LOOP
        IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = role) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', role);
        END IF;
    END LOOP;
END $$;

CREATE TABLE sordino.header(key text PRIMARY KEY, value text NOT NULL);
CREATE TABLE sordino.secret(inner_pad bytea NOT NULL, outer_pad bytea NOT NULL);
CREATE TABLE sordino.entries(
    sequence bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    dataset text NOT NULL CHECK (length(dataset) BETWEEN 1 AND 100 AND position(E'\n' IN dataset) = 0),
    number bigint NOT NULL,
    kind text NOT NULL,
    run text NOT NULL CHECK (position(E'\n' IN run) = 0),
    person text NOT NULL CHECK (position(E'\n' IN person) = 0),
    at text NOT NULL,
    cost text NOT NULL CHECK (position(E'\n' IN cost) = 0),
    nonce text NOT NULL UNIQUE CHECK (position(E'\n' IN nonce) = 0),
    content text NOT NULL CHECK (position(E'\n' IN content) = 0),
    chain bytea NOT NULL,
    signature bytea NOT NULL,
    total double precision NOT NULL,
    UNIQUE (dataset, number)
);
CREATE INDEX entries_by_kind ON sordino.entries(dataset, kind);
CREATE INDEX entries_by_run ON sordino.entries(dataset, run);
CREATE INDEX first_entries ON sordino.entries(dataset) WHERE number = 1;

CREATE FUNCTION sordino.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the vault is append-only' USING ERRCODE = 'SV001';
END $$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON sordino.entries
    FOR EACH STATEMENT EXECUTE FUNCTION sordino.refuse();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON sordino.header
    FOR EACH STATEMENT EXECUTE FUNCTION sordino.refuse();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON sordino.secret
    FOR EACH STATEMENT EXECUTE FUNCTION sordino.refuse();

-- Who may do what. The person is the role that logged in: SET ROLE does not change it.
CREATE FUNCTION sordino.owner_of(which text) RETURNS text LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path = sordino, pg_temp AS $$
    SELECT person FROM sordino.entries WHERE dataset = which AND number = 1
$$;
CREATE FUNCTION sordino.is_granted(which text, who text) RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path = sordino, pg_temp AS $$
    SELECT COALESCE((
        SELECT kind = 'grant' FROM sordino.entries
        WHERE dataset = which AND kind IN ('grant', 'revoke') AND content::jsonb ->> 'person' = who
        ORDER BY number DESC LIMIT 1
    ), false)
$$;
CREATE FUNCTION sordino.may_see(which text) RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path = sordino, pg_temp AS $$
    SELECT pg_has_role(session_user, 'sordino_auditor', 'MEMBER')
        OR sordino.owner_of(which) = session_user
        OR sordino.is_granted(which, session_user)
        OR EXISTS (SELECT 1 FROM sordino.entries WHERE dataset = which AND kind IN ('reserve', 'settle') AND person = session_user)
$$;

CREATE FUNCTION sordino.visible() RETURNS SETOF text LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path = sordino, pg_temp AS $$
    SELECT dataset FROM sordino.entries WHERE number = 1 AND sordino.may_see(dataset)
$$;

ALTER TABLE sordino.entries ENABLE ROW LEVEL SECURITY;
CREATE POLICY those_concerned ON sordino.entries FOR SELECT USING (dataset IN (SELECT sordino.visible()));

-- HMAC-SHA-256 from SHA-256, with both pads computed beforehand.
CREATE FUNCTION sordino.sign(chain bytea) RETURNS bytea LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path = sordino, pg_temp AS $$
    SELECT sha256(outer_pad || sha256(inner_pad || chain)) FROM sordino.secret
$$;
CREATE FUNCTION sordino.is_signed(chain bytea, signature bytea) RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path = sordino, pg_temp AS $$
    SELECT sordino.sign(chain) = signature
$$;

-- Nobody else changes this dataset until the transaction ends.
CREATE FUNCTION sordino.lock(which text) RETURNS void LANGUAGE sql AS $$
    SELECT pg_advisory_xact_lock(hashtextextended('sordino vault ' || which, 0))
$$;

CREATE FUNCTION sordino.append(
    which text, what text, of_run text, price text, once text, said text,
    OUT number bigint, OUT person text, OUT at text, OUT chain bytea, OUT signature bytea
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = sordino, pg_temp AS $$
#variable_conflict use_column
DECLARE
    owner text := sordino.owner_of(which);
    who text := session_user;
    last record;
    cost double precision := price::double precision;
    ceiling double precision;
    whose text;
    holds double precision;
    fails double precision := COALESCE((said::jsonb ->> 'failing')::double precision, 0);
    aside double precision;
    set_apart double precision;
BEGIN
    IF NOT (cost > '-Infinity' AND cost < 'Infinity' AND fails > '-Infinity' AND fails < 'Infinity') THEN
        RAISE EXCEPTION 'a cost of % is no number', price USING ERRCODE = 'SV002';  -- NaN is above everything here
    END IF;
    PERFORM sordino.lock(which);
    SELECT e.number, e.chain, e.total INTO last FROM sordino.entries e
        WHERE e.dataset = which ORDER BY e.number DESC LIMIT 1;
    IF what = 'create' THEN
        IF NOT pg_has_role(who, 'sordino_owner', 'MEMBER') THEN
            RAISE EXCEPTION '% is no member of sordino_owner', who USING ERRCODE = 'SV002';
        END IF;
        IF owner IS NOT NULL THEN
            RAISE EXCEPTION 'dataset % has a budget already', which USING ERRCODE = 'SV002';
        END IF;
        SELECT 0::bigint AS number, sha256(convert_to(E'sordino-vault-1\n' || which, 'UTF8')) AS chain,
            0::double precision AS total INTO last;
    ELSIF owner IS NULL THEN
        RAISE EXCEPTION 'dataset % has no budget', which USING ERRCODE = 'SV002';
    ELSIF what IN ('raise', 'grant', 'revoke', 'close', 'write-off') THEN
        IF who <> owner THEN
            RAISE EXCEPTION 'only %, its owner, may change the budget of %', owner, which USING ERRCODE = 'SV002';
        END IF;
    ELSIF what = 'reserve' THEN
        IF who <> owner AND NOT sordino.is_granted(which, who) THEN
            RAISE EXCEPTION '% may not draw on dataset %', who, which USING ERRCODE = 'SV002';
        END IF;
        SELECT (e.content::jsonb ->> 'limit')::double precision INTO ceiling FROM sordino.entries e
            WHERE e.dataset = which AND e.kind IN ('create', 'raise') ORDER BY e.number DESC LIMIT 1;
        IF NOT (cost >= 0 AND (ceiling IS NULL OR cost = 0 OR last.total + cost <= ceiling * (1 + 1e-9))) THEN
            RAISE EXCEPTION 'dataset % has % left of %', which, ceiling - last.total, ceiling USING ERRCODE = 'SV003';
        END IF;
        IF fails <> 0 THEN  -- a part of delta for releases that may fail, which add up to at most what was set aside
            SELECT (e.content::jsonb ->> 'failing')::double precision INTO aside FROM sordino.entries e
                WHERE e.dataset = which AND e.number = 1;
            SELECT COALESCE(SUM((e.content::jsonb ->> 'failing')::double precision), 0) INTO set_apart
                FROM sordino.entries e WHERE e.dataset = which AND e.kind IN ('reserve', 'settle');
            IF NOT (fails > 0 AND (ceiling IS NULL OR set_apart + fails <= aside * (1 + 1e-9))) THEN
                RAISE EXCEPTION 'dataset % has % of delta left for values that are named', which, aside - set_apart
                    USING ERRCODE = 'SV003';
            END IF;
        END IF;
        IF jsonb_array_length(said::jsonb -> 'events') > 0 AND EXISTS (
            SELECT 1 FROM sordino.entries e WHERE e.dataset = which AND e.kind = 'close'
        ) THEN
            RAISE EXCEPTION 'the budget of dataset % is closed', which USING ERRCODE = 'SV003';
        END IF;
    ELSIF what <> 'settle' THEN
        RAISE EXCEPTION 'kind % is unknown', what USING ERRCODE = 'SV002';
    END IF;
    IF what IN ('reserve', 'settle') THEN
        SELECT e.person INTO whose FROM sordino.entries e
            WHERE e.dataset = which AND e.run = of_run AND e.kind IN ('reserve', 'settle') ORDER BY e.number LIMIT 1;
        IF whose <> who AND NOT (what = 'settle' AND who = owner) THEN
            RAISE EXCEPTION 'run % is not %''s', of_run, who USING ERRCODE = 'SV002';
        END IF;
        -- A run that is unknown, because the database was put back to a state before it, may be counted.
        IF whose IS NULL AND who <> owner AND NOT sordino.is_granted(which, who) THEN
            RAISE EXCEPTION '% may not draw on dataset %', who, which USING ERRCODE = 'SV002';
        END IF;
        IF EXISTS (
            SELECT 1 FROM sordino.entries e WHERE e.dataset = which AND e.run = of_run AND e.kind = 'write-off'
        ) THEN
            RAISE EXCEPTION 'run % was written off', of_run USING ERRCODE = 'SV003';
        END IF;
        SELECT COALESCE(SUM(e.cost::double precision), 0) INTO holds FROM sordino.entries e
            WHERE e.dataset = which AND e.run = of_run;
        IF NOT holds + cost >= -1e-9 THEN
            RAISE EXCEPTION 'run % holds % and cannot return more', of_run, holds USING ERRCODE = 'SV002';
        END IF;
        IF fails < 0 THEN
            SELECT COALESCE(SUM((e.content::jsonb ->> 'failing')::double precision), 0) INTO set_apart
                FROM sordino.entries e WHERE e.dataset = which AND e.run = of_run;
            IF set_apart + fails < -1e-9 * set_apart THEN
                RAISE EXCEPTION 'run % holds % of delta and cannot return more', of_run, set_apart
                    USING ERRCODE = 'SV002';
            END IF;
        END IF;
    ELSIF cost <> 0 THEN
        RAISE EXCEPTION 'a % costs nothing', what USING ERRCODE = 'SV002';
    END IF;
    number := last.number + 1;
    person := who;
    at := to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI"Z"');
    chain := sha256(last.chain || convert_to(
        array_to_string(ARRAY[which, number::text, what, of_run, person, at, price, once, said], E'\n'), 'UTF8'));
    signature := sordino.sign(chain);
    INSERT INTO sordino.entries(dataset, number, kind, run, person, at, cost, nonce, content, chain, signature, total)
        VALUES (which, number, what, of_run, person, at, price, once, said, chain, signature, last.total + cost);
END $$;

REVOKE ALL ON ALL TABLES IN SCHEMA sordino FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA sordino FROM PUBLIC;
GRANT USAGE ON SCHEMA sordino TO sordino_owner, sordino_trainer, sordino_auditor;
GRANT SELECT ON sordino.entries, sordino.header TO sordino_owner, sordino_trainer, sordino_auditor;
GRANT EXECUTE ON FUNCTION sordino.is_signed(bytea, bytea), sordino.visible()
    TO sordino_owner, sordino_trainer, sordino_auditor;
GRANT EXECUTE ON FUNCTION sordino.lock(text), sordino.append(text, text, text, text, text, text)
    TO sordino_owner, sordino_trainer;
