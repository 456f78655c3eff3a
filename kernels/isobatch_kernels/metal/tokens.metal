// Token ids of a step, some of which the step before it chose on the device.
// @use common

// @kernel take_tokens
// @inputs ids sources argmax quantiles draws sizes
// @outputs taken
// sources: -1 for the literal id, else a wanted position of the step before. draws: whether the quantile's token counts
// there. A row that was not finite may have chosen nothing; its token is 0. sizes: T, V. Grid (ceil(T/256)*256, 1, 1).
{
  const int T = sizes[0], V = sizes[1], t = int(thread_position_in_grid.x);
  if (t >= T) return;
  const int source = sources[t];
  int id = ids[t];
  if (source >= 0) {
    id = draws[source] != 0 ? quantiles[source] : argmax[source];
    id = id < 0 || id >= V ? 0 : id;
  }
  taken[t] = id;
}
