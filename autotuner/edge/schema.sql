-- The state of autotuner. One writer at a time; WAL, synchronous=FULL. Times ending in _at are UTC labels,
-- mono_s is seconds since boot_id's boot. JSON columns hold the pydantic models named beside them.
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);

CREATE TABLE IF NOT EXISTS candidates (
  id TEXT PRIMARY KEY,
  body TEXT NOT NULL,          -- core.candidate.Candidate
  source TEXT NOT NULL,        -- the file as it was enqueued; it is not read again
  source_name TEXT NOT NULL
);

CREATE TABLE IF NOT EXISTS trials (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  slot TEXT NOT NULL,
  candidate_id TEXT NOT NULL REFERENCES candidates(id),
  name TEXT NOT NULL,
  hypothesis TEXT NOT NULL DEFAULT '',
  benchmark TEXT NOT NULL,
  benchmark_hash TEXT NOT NULL,
  benchmark_body TEXT NOT NULL, -- bench.workload.Benchmark, as it was when enqueued
  state TEXT NOT NULL,         -- core.state.TrialState
  priority INTEGER NOT NULL DEFAULT 0,
  position REAL NOT NULL,
  is_baseline INTEGER NOT NULL DEFAULT 0,
  interruptions INTEGER NOT NULL DEFAULT 0,
  ended TEXT,                  -- core.policy.Fired: the rule that ended it outside a level
  verdict TEXT,                -- core.state.Verdict
  promoted INTEGER NOT NULL DEFAULT 0,
  reasons TEXT NOT NULL DEFAULT '[]',
  score TEXT,                  -- core.statistics.Interval
  entry INTEGER,
  enqueued_at TEXT NOT NULL,
  begun_at TEXT,
  begun_boot TEXT,
  begun_mono_s REAL,
  ended_at TEXT,
  busy_s REAL NOT NULL DEFAULT 0,
  basis TEXT,                  -- core.verdict.TrialSoFar: what the verdict was made from; since schema 2
  confirms INTEGER,            -- the trial whose win this one measures again on a fresh launch, or, with is_baseline,
                               -- for whose sake the best-known is measured again; since schema 3
  parent INTEGER,              -- the trial whose rule proposed this candidate, or the baseline that this one repeats; since schema 3
  answers TEXT NOT NULL DEFAULT '[]', -- what the server answered to the fixed greedy prompts; since schema 3
  alpha REAL,                  -- its part of the campaign's error budget, settled when it began; since schema 5
  force INTEGER NOT NULL DEFAULT 0 -- it waits neither for requests on the best-known nor for a window; since schema 7
);
CREATE INDEX IF NOT EXISTS trials_by_state ON trials (slot, state);
CREATE INDEX IF NOT EXISTS trials_by_candidate ON trials (slot, candidate_id, benchmark_hash);

CREATE TABLE IF NOT EXISTS results (
  trial_id INTEGER NOT NULL REFERENCES trials(id) ON DELETE CASCADE,
  level INTEGER NOT NULL,      -- bench.benchmark.Level: SQLite keeps one like 0.5 as the REAL that it is
  body TEXT NOT NULL,          -- core.verdict.LevelResult
  evidence BLOB,               -- zlib-compressed JSON: windows, samples, the facts of each look
  gaps BLOB,                   -- the samples' gaps between events, as bench.samples.LevelSamples has them but without
                               -- base64: zlib over unsigned 32 bit little endian microseconds; since schema 6
  PRIMARY KEY (trial_id, level)
);

-- What rules proposed, and what became of it; since schema 4.
CREATE TABLE IF NOT EXISTS proposals (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  trial_id INTEGER NOT NULL,   -- the trial that the rule looked at
  slot TEXT NOT NULL,
  state TEXT NOT NULL,         -- core.state.ProposalState
  fired TEXT NOT NULL,         -- core.policy.Fired
  level INTEGER,               -- the one at which it fired; none at a start
  known TEXT,                  -- engines.base.Effective: what the server had said by then
  at TEXT NOT NULL,
  name TEXT NOT NULL DEFAULT '',
  body TEXT,                   -- core.candidate.Candidate
  file TEXT NOT NULL DEFAULT '',
  said TEXT NOT NULL DEFAULT '', -- the reason, with numbers
  gain REAL,                   -- expected; 0.05 is 5 %
  gpu_s REAL,                  -- what its trial takes
  why TEXT NOT NULL DEFAULT '', -- why it is not queued
  queued_as INTEGER            -- its own trial
);

-- The text of every policy that a level was looked at with, so that its verdict can be computed again; since schema 2.
CREATE TABLE IF NOT EXISTS policies (sha256 TEXT PRIMARY KEY, file TEXT NOT NULL, text TEXT NOT NULL);

CREATE TABLE IF NOT EXISTS launches (
  id TEXT PRIMARY KEY,
  slot TEXT NOT NULL,
  candidate_id TEXT NOT NULL REFERENCES candidates(id),
  name TEXT NOT NULL,
  purpose TEXT NOT NULL,       -- core.state.Purpose
  trial_id INTEGER,
  state TEXT NOT NULL,         -- core.state.LaunchState
  intended_at TEXT NOT NULL,
  boot_id TEXT NOT NULL,
  mono_s REAL NOT NULL,
  ready_s REAL,
  gpu_used_mib TEXT NOT NULL DEFAULT '{}',
  stages TEXT NOT NULL DEFAULT '[]', -- [stage, seconds since the launch at which it was reached]
  ended_at TEXT,
  exit_code INTEGER,
  end_asked INTEGER NOT NULL DEFAULT 0,
  diagnosis TEXT,              -- engines.base.Diagnosis
  engine_version TEXT,         -- of the program that was started, where it could be told; since schema 2
  configuration TEXT,          -- core.effective.Configuration: what the server resolved; since schema 2
  gpu_pids TEXT NOT NULL DEFAULT '[]' -- processes seen on the GPUs as its own, until its memory is back; since schema 9
);
CREATE INDEX IF NOT EXISTS launches_by_state ON launches (slot, state);

CREATE TABLE IF NOT EXISTS incumbents (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  slot TEXT NOT NULL,
  candidate_id TEXT NOT NULL REFERENCES candidates(id),
  name TEXT NOT NULL,
  trial_id INTEGER NOT NULL,
  at TEXT NOT NULL
);

CREATE TABLE IF NOT EXISTS slots (
  name TEXT PRIMARY KEY,
  paused TEXT NOT NULL DEFAULT '',
  hands_off TEXT NOT NULL DEFAULT '',
  restore_wanted TEXT NOT NULL DEFAULT '',
  restore_hold INTEGER NOT NULL DEFAULT 0,
  degraded TEXT NOT NULL DEFAULT '',
  blocked TEXT NOT NULL DEFAULT '',
  campaign_from INTEGER NOT NULL DEFAULT 0, -- trials up to this one cost an earlier campaign's budget
  failures_from INTEGER NOT NULL DEFAULT 0, -- launches up to this rowid count no more against the restart budget
  stopped TEXT NOT NULL DEFAULT '',         -- why no server is to run; since schema 7
  force INTEGER NOT NULL DEFAULT 0          -- what serves is not drained before it is stopped; since schema 7
);

-- A journal a slot, called like the slot; '' is the common one of earlier versions. Ids follow the order of decisions.
CREATE TABLE IF NOT EXISTS entries (
  id INTEGER PRIMARY KEY,
  journal TEXT NOT NULL,       -- since schema 8; until then all entries were of one journal
  number INTEGER NOT NULL,
  slot TEXT NOT NULL,
  title TEXT NOT NULL,
  at TEXT NOT NULL,
  prev TEXT NOT NULL,
  sha256 TEXT NOT NULL,
  text TEXT NOT NULL,
  trial_id INTEGER,
  published INTEGER NOT NULL DEFAULT 0,
  UNIQUE (journal, number)
);
