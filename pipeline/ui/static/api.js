// Where the data comes from: the server, or what a report holds in itself.

const holder = document.getElementById("embedded");

export const embedded = holder ? JSON.parse(holder.textContent) : null;

export async function get(name, params) {
  if (embedded) return fromReport(name, params || {});
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params || {})) {
    if (value === null || value === undefined || value === "") continue;
    for (const each of Array.isArray(value) ? value : [value]) query.append(key, each);
  }
  const response = await fetch(`/api/${name}?${query}`);
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body && body.error ? body.error : `${response.status} ${response.statusText}`);
  }
  return response.json();
}

export function listen(onstatus, onlost) {
  if (embedded) {
    onstatus(embedded.status);
    return;
  }
  const stream = new EventSource("/api/live");
  stream.onmessage = (message) => onstatus(JSON.parse(message.data));
  stream.onerror = () => onlost();
}

function fromReport(name, params) {
  if (name === "events") return reportEvents(params);
  if (name === "event") {
    const found = embedded.details[params.row];
    if (!found) throw new Error("this event is not part of the report: open the run with `pipeline ui`");
    return found;
  }
  if (name === "samples") return reportSamples(params);
  if (name === "sample") return embedded.samples.tokens[params.row];
  if (!(name in embedded)) throw new Error(`a report holds no ${name}`);
  return embedded[name];
}

function reportSamples(params) {
  const keys = { lowest: (each) => each.reward, highest: (each) => -each.reward, longest: (each) => -each.tokens };
  const key = keys[params.order];
  const found = embedded.samples.samples.filter(
    (each) =>
      (!params.index || each.index === Number(params.index)) &&
      (!params.version || (each.versions.length && each.versions[0] <= Number(params.version) && Number(params.version) <= each.versions.at(-1))) &&
      (!params.split || each.split === params.split),
  );
  if (key) found.sort((one, other) => key(one) - key(other));
  const first = params.offset || 0;
  return { total: found.length, offset: first, samples: found.slice(first, first + params.limit) };
}

function reportEvents(params) {
  const text = (params.text || "").toLowerCase();
  const kinds = [].concat(params.kind || []).filter(Boolean);
  const actors = [].concat(params.actor || []).filter(Boolean);
  const zero = embedded.timeline.zero;
  const found = embedded.events.filter(
    (event) =>
      (!kinds.length || kinds.some((kind) => (kind.endsWith("*") ? event.kind.startsWith(kind.slice(0, -1)) : kind === event.kind))) &&
      (!actors.length || actors.includes(event.actor)) &&
      (!params.since || event.at - zero >= Number(String(params.since).replace("+", ""))) &&
      (!params.until || event.at - zero <= Number(String(params.until).replace("+", ""))) &&
      (!text || `${event.kind} ${event.actor} ${event.text}`.toLowerCase().includes(text)),
  );
  const first = params.offset || 0;
  return { total: found.length, offset: first, events: found.slice(first, first + (params.limit || 100)) };
}
