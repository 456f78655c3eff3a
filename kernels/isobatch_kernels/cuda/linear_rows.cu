// Linear layers for few rows, bound by the weights' way from memory. A warp has one slice of K and NT tiles of 16 outputs at a
// time, and streams its records through a ring of asynchronous copies. A block holds the rows of its slices in shared memory, so
// rows are read once for all its outputs. The copy engine brings them row by row; a block with one slice gets them in four parts
// and begins with the first. A team are the eight warps, of one block or of a cluster's, that have the same tiles: each leaves a
// part of its sums with every block of the cluster, goes on with the next tiles, and then adds its share of its own block's part;
// where that is less than a warp for each, the warps take turns. Where there are no clusters and a block has not all slices, each
// warp leaves its sums in memory, and the last one of the eight adds them.
// @use weights

// The sum of slices in their order; `apart` floats from one to the next.
__device__ __forceinline__ float x1_add_slices(const float* parts, int apart) {
  float total = parts[0];
#pragma unroll
  for (int s = 1; s < kSlices; s++) total = x1_add(total, parts[s * apart]);
  return total;
}
// The same with fewer sub-blocks than slices: some of these are empty, and skipped.
__device__ __forceinline__ float x1_add_some_slices(const float* parts, int apart, int NB) {
  float total = 0.0f;
  bool is_first = true;
#pragma unroll 1
  for (int s = 0; s < kSlices; s++) {
    if (x1_slice_begin(s, NB) == x1_slice_begin(s + 1, NB)) continue;
    total = is_first ? parts[s * apart] : x1_add(total, parts[s * apart]);
    is_first = false;
  }
  return total;
}

// One output: what is added to it, and where it goes.
struct Finish {
  size_t at;
  float bias, residual;
  bool wanted;
  __device__ __forceinline__ void aim(bool is_wanted, int n, size_t place, const float* biases, const float* residuals) {
    wanted = is_wanted;
    at = place;
    bias = wanted && biases ? biases[n] : 0.0f;
    residual = wanted && residuals ? residuals[place] : 0.0f;
  }
  __device__ __forceinline__ void put(float total, float* y, const float* biases, const float* residuals, bool logit) const {
    y[at] = finish_output(total, biases, bias, residuals, residual, logit);
  }
};

// @kernel linear_rows
// @constants SB B ST NT MT HELD SLICES CLUSTER TEAMS SETS DEEP STAGES RESIDENT LOGIT
// w (tiles, words of a tile); q (M, K); ds (K/B, padded, 2): d and s; bias (N) and residual (M, stride) null where absent;
// y (M, stride). MT: tiles of 8 rows of a block; HELD: rows of a tile that have room, at least min(M, 8), 8 where MT > 1.
// SLICES of the eight in a block. CLUSTER: 8/SLICES, or 1 where sums go through memory. SETS of sums that a block has room for:
// 1 where every team has one group of tiles at most, else 2. DEEP: records of a tile in a stage of the ring. partials: room for
// (row tiles, groups of NT tiles, 8, NT*MT, 32) float4; arrived: a zero for each of (row tiles, groups), and zero again
// afterwards; both are for sums that go through memory.
// Blocks (ceil(M/(8*MT)), y, 8/SLICES) of 32*SLICES*TEAMS, RESIDENT of them on a multiprocessor, in clusters along z. Each has a
// group of tiles at least, so (y - 1)*TEAMS is less than there are: a block without one would end while its rows still come.
X1_KERNEL __launch_bounds__(32 * SLICES * TEAMS, RESIDENT) linear_rows(
    const unsigned* w, const fp16* q, const float* ds, const float* bias, const float* residual, float* y, float4* partials,
    unsigned* arrived, int M, int K, int N, int stride, int padded) {
  using R = Record<SB, B, ST>;
  constexpr int kLaneRow = B / 8;  // words of a row's sub-block that a lane multiplies, 2 to 8
  constexpr int kThreads = 32 * SLICES * TEAMS, kTile = DEEP * R::kWords, kStage = NT * kTile;
  // Up to four rows take every second column, so that a lane's sums are those of one row.
  constexpr bool kSpread = MT == 1 && HELD <= 4;
  constexpr int kRowsOfLane = kSpread ? 1 : 2;
  // Sums that meet in shared memory: of a lane, of a warp's part in one block, of a set.
  constexpr bool kJoined = SLICES * CLUSTER == kSlices;
  constexpr int kOwn = 32 / CLUSTER, kLane = kSpread ? 2 : 4;  // lanes whose sums a block adds, and how many each has
  constexpr int kPart = NT * MT * kOwn * kLane, kSet = kSlices * kPart;
  // How far apart rows lie in shared memory, in words modulo 32: lanes that load operands of neighbouring rows meet in no bank.
  constexpr int kApart = B == 64 ? 4 : B == 32 ? 16 : 8;
  X1_DYNAMIC_SHARED;
  const int NB = K / B, m0 = blockIdx.x * MT * 8, held = min(M - m0, MT * 8);
  // What follows from the number of a warp is the same in all lanes, and the compiler is told so: it needs one register for it,
  // and no branch has to be joined again.
  const unsigned warp = __shfl_sync(kAllLanes, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int slice = blockIdx.z * SLICES + warp % SLICES, team = warp / SLICES;
  const int begin = x1_slice_begin(slice, NB), length = x1_slice_begin(slice + 1, NB) - begin;
  const int first = x1_slice_begin(blockIdx.z * SLICES, NB), count = x1_slice_begin((blockIdx.z + 1) * SLICES, NB) - first;
  const int last_tile = (N + 15) / 16 - 1, groups = last_tile / NT + 1, step = gridDim.y * TEAMS;
  const size_t tile_words = (size_t)NB * R::kWords;
  // Long rows of a block with one slice come in parts, and multiplication begins with the first. With more slices all come at
  // once.
  constexpr int kRowParts = SLICES == 1 ? 4 : 1;
  const int parts = length >= 4 * kRowParts ? kRowParts : 1;
  // Barriers of the rings, of the rows, of the sums; the rings; sums (TEAMS, SETS, 8, parts); rows (MT, HELD, `pitch` words); their
  // pairs (sub-blocks, 8*MT, 2). Blocks of a cluster have the same but for the lengths of the last two.
  constexpr int kWarps = kThreads / 32, kMeetings = kJoined ? TEAMS * SETS : 0;
  constexpr int kBarriers = ((kWarps * STAGES + kRowParts + kMeetings) * 2 + 3) / 4 * 4;
  unsigned* rings = reinterpret_cast<unsigned*>(shared) + kBarriers;
  unsigned* ring = rings + warp * STAGES * kStage;
  float* sums = reinterpret_cast<float*>(rings + kWarps * STAGES * kStage) + team * SETS * kSet;
  unsigned* rows = rings + kWarps * STAGES * kStage + (kJoined ? TEAMS * SETS * kSet : 0);
  const int pitch = count * (B / 2) + (kApart - count * (B / 2) & 31);
  float* pairs = reinterpret_cast<float*>(rows + MT * HELD * pitch);
  const unsigned barriers = x1_shared_address(shared) + warp * STAGES * 8, ring_address = x1_shared_address(ring);
  const unsigned row_barriers = x1_shared_address(shared) + kWarps * STAGES * 8;
  const unsigned meetings = row_barriers + (kRowParts + team * SETS) * 8;
  const unsigned sums_address = x1_shared_address(sums);

  // What is asked for next: records from `next` of the slice on, of a group of tiles, from `from` on. A tile that is not there is
  // replaced by the one before it.
  int next = 0, next_group = blockIdx.y * TEAMS + team;
  const unsigned* from = w + next_group * NT * tile_words + (size_t)begin * R::kWords;
  const size_t to_next_group = step * NT * tile_words - (size_t)(length + DEEP - 1) / DEEP * kTile;
  auto request = [&](int stage) {
    if (next_group >= groups || length == 0) return;
    const unsigned bytes = min(DEEP, length - next) * (R::kWords * 4), barrier = barriers + 8 * stage;
    x1_expect(barrier, NT * bytes, lane);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      const unsigned* tile = nt == 0 || next_group * NT + nt <= last_tile ? from + nt * tile_words : from;
      x1_copy_run(ring_address + 4 * (stage * kStage + nt * kTile), tile, bytes, barrier, lane);
    }
    x1_arrive(barrier);
    from += kTile;
    next += DEEP;
    if (next >= length) {
      next = 0;
      next_group += step;
      from += to_next_group;
    }
  };
  // Weights are the same in every step, so the ring is filled with them while the previous launch still runs.
  x1_let_next_begin();
  x1_make_barriers(barriers, STAGES, 1, lane);
  for (int stage = 0; stage < STAGES - 1; stage++) request(stage);
  if (warp == 0) x1_make_barriers(row_barriers, kRowParts, kWarps, lane);
  if (kJoined && warp % SLICES == 0) x1_make_meetings<CLUSTER>(meetings, SETS, kSlices, 4 * kSet, lane);
  x1_barriers_made<CLUSTER>();
  x1_after_previous();
  {
    // The warps ask for rows by turns. Where a block's tiles are all of the padded rows, its pairs are one run of memory, else one
    // for each sub-block.
    const unsigned row_address = x1_shared_address(rows), pair_address = x1_shared_address(pairs);
    const int pair_bytes = min(MT * 8, padded - m0) * 8;
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
      const int begin_of_part = part * count / parts, run = (part + 1) * count / parts - begin_of_part, bytes = run * B * 2;
      const unsigned barrier = row_barriers + 8 * part;
      if (warp == 0) x1_expect(barrier, held * bytes + run * pair_bytes, lane);
      if (run == 0) continue;  // a slice that is empty, whose rows nobody waits for
#pragma unroll 1
      for (int m = warp; m < held; m += kWarps) {
        const unsigned at = row_address + 4 * (m * pitch + begin_of_part * (B / 2));
        x1_copy_run(at, q + (size_t)(m0 + m) * K + (size_t)(first + begin_of_part) * B, bytes, barrier, lane);
      }
      const float* these = ds + ((size_t)(first + begin_of_part) * padded + m0) * 2;
      const unsigned to_pairs = pair_address + begin_of_part * MT * 64;
      if (padded == MT * 8) {
        if (warp == kWarps - 1) x1_copy_run(to_pairs, these, run * pair_bytes, barrier, lane);
      } else {
#pragma unroll 1
        for (int j = warp; j < run; j += kWarps) {
          x1_copy_run(to_pairs + j * MT * 64, these + (size_t)j * padded * 2, pair_bytes, barrier, lane);
        }
      }
      x1_arrive(barrier);
    }
  }

  // Columns of rows that are not there hold another row's integers or what lies there: columns of a product do not mix.
  const int row = kSpread ? g / 2 % HELD : g % HELD;
  const unsigned* own_rows = rows + row * pitch + (begin - first) * (B / 2) + t * kLaneRow;
  const float* own_pairs = pairs + (begin - first) * MT * 16 + t * 2 * kRowsOfLane;
  float acc[NT][MT][4];
  // Record j of the slice; `words_at` and `affine_at` are a lane's of it.
  auto multiply_record = [&](const unsigned* words_at, const unsigned* affine_at, int j) {
    unsigned a[NT][R::kMmas][4];
    Affine low[NT], high[NT];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      alignas(16) unsigned words[R::kLaneWords];
#pragma unroll
      for (int i = 0; i < R::kLaneWords; i += R::kPiece) {
        load_words<R::kPiece>(words_at + nt * kTile + R::word(0, i), words + i);
      }
      load_affine<ST>(affine_at + nt * kTile, 0, low[nt], high[nt]);
      low[nt].scale = x1_mul(low[nt].scale, R::kScale);
      high[nt].scale = x1_mul(high[nt].scale, R::kScale);
#pragma unroll
      for (int i = 0; i < R::kMmas; i++) expand<SB>(words, i, a[nt][i]);
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
      const float* pair = own_pairs + (j * MT + mt) * 16;
      // A lane (g, t) has inputs t*B/4 and on of a row.
      alignas(16) unsigned b[kLaneRow];
      load_words<kLaneRow>(own_rows + mt * 8 * pitch + j * (B / 2), b);
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (kSpread) {
        const float2 one = *reinterpret_cast<const float2*>(pair);
        v.x = one.x;
        v.y = one.y;
      } else {
        v = *reinterpret_cast<const float4*>(pair);
      }
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        float p[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < R::kMmas; i++) mma16816(p, a[nt][i], b[2 * i], b[2 * i + 1]);
        float(&sum)[4] = acc[nt][mt];
        sum[0] = x1_fma(v.x, x1_fma(low[nt].scale, p[0], x1_mul(low[nt].bias, v.y)), sum[0]);
        sum[2] = x1_fma(v.x, x1_fma(high[nt].scale, p[2], x1_mul(high[nt].bias, v.y)), sum[2]);
        if (kSpread) continue;
        sum[1] = x1_fma(v.z, x1_fma(low[nt].scale, p[1], x1_mul(low[nt].bias, v.w)), sum[1]);
        sum[3] = x1_fma(v.z, x1_fma(high[nt].scale, p[3], x1_mul(high[nt].bias, v.w)), sum[3]);
      }
    }
  };

  // The place of lane (g, t) among a team's sums is (t, g ^ 2*t): lanes meet in no bank when they leave them, and the lanes that
  // add have two rows of 16 outputs between them. All that leave or join a group of tiles is at fixed distances from these.
  const int place = t * 8 + (g ^ 2 * t), rank = kJoined ? blockIdx.z : 0;
  const unsigned to = x1_in_block<CLUSTER>(sums_address + 4 * (slice * kPart + place % kOwn * kLane), place / kOwn);
  const unsigned to_meeting = x1_in_block<CLUSTER>(meetings, place / kOwn);
  auto leave = [&](unsigned turn) {
    const unsigned set = turn % SETS;
#pragma unroll
    for (int i = 0; i < NT * MT; i++) {
      const float(&sum)[4] = acc[i / MT][i % MT];
      const unsigned at = to + 4 * (set * kSet + i * kOwn * kLane);
      if (kSpread) {
        x1_leave8<CLUSTER>(at, sum[0], sum[2], to_meeting + 8 * set);
      } else {
        x1_leave16<CLUSTER>(at, make_float4(sum[0], sum[1], sum[2], sum[3]), to_meeting + 8 * set);
      }
    }
    x1_have_left<CLUSTER>(meetings + 8 * set, lane);
  };
  // Outputs of a thread, whole tiles from one to the next. Where some warps have none, they take turns.
  constexpr int kEach = (kPart + 32 * SLICES - 1) / (32 * SLICES), kStep = 32 * SLICES / (kOwn * kLane);
  constexpr unsigned kAdding = kPart < 32 * SLICES ? (kPart + 31) / 32 : SLICES;
  // The first output of a thread: row, and output from the group's first on.
  int own_m = 0, own_n = 0;
  auto take_place = [&](unsigned i) {
    const unsigned e = i % kLane, its_place = rank * kOwn + i / kLane % kOwn, tile = i / kLane / kOwn, its_t = its_place / 8;
    own_m = kSpread ? its_t : tile % MT * 8 + 2 * its_t + e % 2;
    own_n = tile / MT * 16 + (its_place % 8 ^ 2 * its_t) + (kSpread ? e : e / 2) * 8;
  };
  take_place(warp % SLICES * 32 + lane);
  x1_keep(own_m);
  x1_keep(own_n);
  auto join = [&](unsigned turn, int group) {
    const unsigned set = turn % SETS, unit = (warp + (kAdding < SLICES ? turn : 0)) % SLICES, i = unit * 32 + lane;
    if (unit >= kAdding) {
      x1_wait_for(meetings + 8 * set, turn / SETS & 1);
      return;
    }
    if (kAdding < SLICES) take_place(i);
    const int m = own_m, n = group * NT * 16 + own_n;
    // What is added is on its way while the sums are waited for.
    Finish finish[kEach];
    const size_t at = (size_t)(m0 + m) * stride + n;
#pragma unroll
    for (int k = 0; k < kEach; k++) {
      const int down = kStep * k % MT * 8, right = kStep * k / MT * 16;
      const bool wanted = i + k * 32 * SLICES < kPart && m + down < held && n + right < N;
      finish[k].aim(wanted, n + right, at + (size_t)down * stride + right, bias, residual);
    }
    x1_wait_for(meetings + 8 * set, turn / SETS & 1);
    if (unit == 0) x1_expect_sums<CLUSTER>(meetings + 8 * set, 4 * kSet, lane);
    const float* own_sums = sums + set * kSet + i;
    float totals[kEach];
    if (NB >= kSlices) {
#pragma unroll
      for (int k = 0; k < kEach; k++) totals[k] = x1_add_slices(own_sums + k * 32 * SLICES, kPart);
    } else {
#pragma unroll
      for (int k = 0; k < kEach; k++) totals[k] = x1_add_some_slices(own_sums + k * 32 * SLICES, kPart, NB);
    }
#pragma unroll
    for (int k = 0; k < kEach; k++) {
      if (finish[k].wanted) finish[k].put(totals[k], y, bias, residual, LOGIT);
    }
  };

  const unsigned* lane_words = ring + R::word(lane, 0);
  const unsigned* lane_affine = ring + R::kQuantWords + g * (ST == 2 ? 4 : 2);
  int stage = 0, part = 0, ready = 0;  // records whose rows have come
  unsigned parity = 0;
  int group = blockIdx.y * TEAMS + team;
  unsigned turn = 0;
  for (; group < groups; group += step, turn++) {
#pragma unroll
    for (int i = 0; i < NT * MT * 4; i++) acc[i / 4 / MT][i / 4 % MT][i % 4] = 0.0f;
    for (int j = 0; j < length; j += DEEP) {
      x1_wait_for(barriers + 8 * stage, parity);
      __syncwarp();
      request(stage == 0 ? STAGES - 1 : stage - 1);
      const unsigned *words_at = lane_words + stage * kStage, *affine_at = lane_affine + stage * kStage;
      const int here = length - j;
      while (ready < min(length, j + DEEP)) {
        x1_wait_for(row_barriers + 8 * part, 0);
        part++;
        ready = part * length / parts;
      }
      // Without a branch between records, what one waits for is hidden by the next.
      if (here >= DEEP) {
#pragma unroll
        for (int u = 0; u < DEEP; u++) multiply_record(words_at + u * R::kWords, affine_at + u * R::kWords, j + u);
      } else if (here == DEEP - 1) {
#pragma unroll
        for (int u = 0; u < DEEP - 1; u++) multiply_record(words_at + u * R::kWords, affine_at + u * R::kWords, j + u);
      } else {
#pragma unroll 1
        for (int u = 0; u < here; u++) multiply_record(words_at + u * R::kWords, affine_at + u * R::kWords, j + u);
      }
      stage++;
      if (stage == STAGES) {
        stage = 0;
        parity ^= 1u;
      }
    }

    if (kJoined) {
      // The other warps have had the time of these tiles to bring their sums of the last ones.
      if (SETS > 1 && turn > 0) join(turn - 1, group - step);
      leave(turn);
    } else {
      const size_t here = (size_t)blockIdx.x * groups + group;
      float4* all = partials + here * kSlices * NT * MT * 32 + lane;
#pragma unroll
      for (int i = 0; i < NT * MT; i++) {
        const float(&sum)[4] = acc[i / MT][i % MT];
        if (i % MT * 8 + t * kRowsOfLane < held) all[(slice * NT * MT + i) * 32] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
      __threadfence();
      __syncwarp();
      unsigned before = 0;
      if (lane == 0) before = atomicAdd(arrived + here, 1u);
      before = __shfl_sync(kAllLanes, before, 0);
      if (before == kSlices - 1) {
        __threadfence();
        if (lane == 0) arrived[here] = 0;
#pragma unroll
        for (int i = 0; i < NT * MT; i++) {
          const int m = i % MT * 8 + t * kRowsOfLane, out = (group * NT + i / MT) * 16 + g;
          if (m >= held) continue;
          float4 parts[kSlices];
#pragma unroll
          for (int s = 0; s < kSlices; s++) parts[s] = x1_fresh16(all + (s * NT * MT + i) * 32);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            if (kSpread && e % 2) continue;
            float own[kSlices];
#pragma unroll
            for (int s = 0; s < kSlices; s++) own[s] = e == 0 ? parts[s].x : e == 1 ? parts[s].y : e == 2 ? parts[s].z : parts[s].w;
            const int its_m = m + e % 2, n = out + e / 2 * 8;
            Finish finish;
            finish.aim(its_m < held && n < N, n, (size_t)(m0 + its_m) * stride + n, bias, residual);
            const float total = NB >= kSlices ? x1_add_slices(own, 1) : x1_add_some_slices(own, 1, NB);
            if (finish.wanted) finish.put(total, y, bias, residual, LOGIT);
          }
        }
      }
    }
  }
  if (kJoined && turn > 0) join(turn - 1, group - step);
}
