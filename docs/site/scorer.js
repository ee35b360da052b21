// Given to the site's search in place of its own scores, which are the same but for `score`.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  // Benchmarks, changes and rules for contributors have many words: guides and reference go first.
  score: ([page, , , , score]) => (page.startsWith("docs/") ? score : score - 4),
};
