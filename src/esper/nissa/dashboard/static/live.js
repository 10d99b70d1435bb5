// The stream of what is new. A lost connection is said, tried again, and goes on where it stopped.

const QUIET_MS = 30000; // The server speaks at least every 10 seconds.

export class Live {
  constructor(names, positions, onChange) {
    this.names = names;
    this.positions = positions;
    this.onChange = onChange;
    this.place = document.getElementById("connection");
    this.heard = Date.now();
    this.source = null;
    this.isOver = false;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.open()));
    this.timer = setInterval(() => this.check(), 5000);
    if (!document.hidden) this.open();
  }

  open() {
    if (this.source || this.isOver) return;
    const query = new URLSearchParams();
    for (const name of this.names) query.append("id", name);
    query.append("after", this.names.map((name) => this.positions[name] || "").join("|"));
    this.source = new EventSource(`/api/stream?${query}`);
    this.source.onopen = () => this.hear();
    this.source.addEventListener("alive", () => this.hear());
    this.source.addEventListener("change", (event) => {
      this.hear();
      event.lastEventId.split("|").forEach((position, place) => {
        if (position) this.positions[this.names[place]] = position;
      });
      this.onChange(JSON.parse(event.data));
    });
    this.source.onerror = () => {
      this.say("lost", "connection lost, trying again");
      // A browser gives up where an answer was an error; we do not.
      if (this.source && this.source.readyState === EventSource.CLOSED) {
        this.pause();
        setTimeout(() => !document.hidden && this.open(), 3000);
      }
    };
  }

  // A hidden page needs no news, and browsers allow only a few open streams.
  pause() {
    this.source?.close();
    this.source = null;
  }

  stop() {
    this.isOver = true;
    clearInterval(this.timer);
    this.pause();
  }

  hear() {
    this.heard = Date.now();
    this.say("live", "live");
  }

  check() {
    if (!document.hidden && this.source && Date.now() - this.heard > QUIET_MS) {
      this.say("lost", "connection lost, trying again");
      this.pause();
      this.heard = Date.now();
      this.open();
    }
  }

  say(state, text) {
    if (this.place.dataset.state === state) return;
    this.place.dataset.state = state;
    this.place.textContent = text;
  }
}
