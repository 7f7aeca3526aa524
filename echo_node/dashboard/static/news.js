// What the node told so far: everything once, and then what is new. Knows nothing of how it is shown.

const MOST_STEPS = 2000;
const MOST_LINES = 500;
const MOST_MOMENTS = 900;
const LATE_MS = 25000; // the node speaks every 10 s at least
export const FORMAT = 1;

export function merged(before, told) {
  if (told.whole || !before) return told;
  return {
    ...told,
    steps: [...before.steps, ...told.steps].slice(-MOST_STEPS),
    log: [...before.log, ...told.log].slice(-MOST_LINES),
    moments: [...before.moments, ...told.moments].slice(-MOST_MOMENTS),
  };
}

export function follow(onNews, onLost) {
  let state = null;
  let source = null;
  let heard = Date.now();

  const open = () => {
    source?.close();
    heard = Date.now();
    source = new EventSource("api/events");
    source.addEventListener("message", (event) => {
      heard = Date.now();
      const told = JSON.parse(event.data);
      const before = told.whole ? null : state;
      state = merged(state, told);
      onNews(state, before);
    });
    source.addEventListener("beat", () => {
      heard = Date.now();
      onNews(state, state);
    });
    source.addEventListener("error", () => {
      onLost();
      if (source.readyState === EventSource.CLOSED) setTimeout(open, 5000);
    });
  };

  setInterval(() => {
    if (Date.now() - heard > LATE_MS) {
      onLost();
      open(); // a laptop that slept: the old connection will never say that it is gone
    }
  }, 5000);
  open();
}
