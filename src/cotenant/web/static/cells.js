// How nodes are drawn: cores and GPUs by NUMA node, in the colour, pattern and letter of the job that holds them.

// Okabe and Ito's colours, which all readers tell apart; then the same with patterns. A label says which it is, too.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7d7d7d"];
const DARK_TEXT = new Set(["#e69f00", "#56b4e9", "#f0e442", "#cc79a7", "#009e73"]);
const PATTERNS = 4, CELL = 14, GPU = 30, GAP = 3, PART = 10, DRAWN_MAX = 1000;
const looks = new Map(), styles = new Map(), drawn = new Map();

/** Return a colour of the theme; asked of the browser once, because each question costs a layout. */
export function css(name) {
  if (!styles.has(name)) styles.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return styles.get(name);
}

/** Forget the colours: the theme has changed. */
export function newTheme() { styles.clear(); drawn.clear(); }

/** Return the colour, pattern and label of a job; they stay as long as the page does. */
export function look(id) {
  if (!looks.has(id)) {
    const number = looks.size, letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    const label = number < 26 ? letters[number] : letters[Math.floor(number / 26 - 1) % 26] + letters[number % 26];
    looks.set(id, { colour: COLOURS[number % COLOURS.length], pattern: Math.floor(number / COLOURS.length) % PATTERNS, label });
  }
  return looks.get(id);
}

function paintCell(ctx, width, height, is) {
  ctx.beginPath();
  ctx.roundRect(0.5, 0.5, width - 1, height - 1, 2.5);
  if (!is) { ctx.fillStyle = css("--raised"); ctx.fill(); ctx.strokeStyle = css("--line"); ctx.lineWidth = 1; ctx.stroke(); return; }
  ctx.clip();
  ctx.fillStyle = is.colour;
  ctx.fillRect(0, 0, width, height);
  ctx.strokeStyle = ctx.fillStyle = "rgb(0 0 0 / 45%)";
  ctx.lineWidth = 1.5;
  if (is.pattern === 1) for (let at = -height; at < width; at += 5) { ctx.beginPath(); ctx.moveTo(at, height); ctx.lineTo(at + height, 0); ctx.stroke(); }
  if (is.pattern === 2) for (let at = 2; at < height; at += 5) ctx.fillRect(0, at, width, 1.5);
  if (is.pattern === 3) for (let a = 3; a < width; a += 5) for (let b = 3; b < height; b += 5) ctx.fillRect(a - 1, b - 1, 2, 2);
}

function write(ctx, width, height, is, text) {
  ctx.font = `600 ${width > 20 ? 12 : 9}px system-ui`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.fillStyle = is ? (DARK_TEXT.has(is.colour) ? "#111" : "#fff") : css("--muted");
  ctx.fillText(text, width / 2, height / 2 + 0.5);
}

/** Draw a cell; its picture is made once, and copied from then on. `ends`: what holds it will have ended. */
export function cell(ctx, x, y, width, height, is, text = "", ends = false) {
  const ratio = devicePixelRatio || 1, key = `${is ? `${is.colour}${is.pattern}` : ""} ${text} ${width} ${height} ${ends} ${ratio}`;
  let picture = drawn.get(key);
  if (!picture) {
    if (drawn.size > DRAWN_MAX) drawn.clear();
    picture = document.createElement("canvas");
    [picture.width, picture.height] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
    const made = picture.getContext("2d");
    made.scale(ratio, ratio);
    if (ends) {
      paintCell(made, width, height, null);
      made.globalAlpha = 0.25;
    }
    made.save();
    paintCell(made, width, height, is);
    made.restore();
    made.globalAlpha = 1;
    if (text) write(made, width, height, ends ? null : is, text);
    drawn.set(key, picture);
  }
  ctx.drawImage(picture, x, y, width, height);
}

const perRow = (width, size) => Math.max(1, Math.floor((width - 2 + GAP) / (size + GAP)));
const partHeight = (part, width) => Math.ceil(part.gpus.length / perRow(width, GPU)) * (GPU + GAP) + Math.ceil(part.cores.length / perRow(width, CELL)) * (CELL + GAP);

/** Return how high the picture of a node is. */
export const heightOf = (node, width) => node.numa.reduce((sum, part) => sum + partHeight(part, width), 0) + PART * Math.max(0, node.numa.length - 1) + 2;

/** Draw a node: for each NUMA node its GPUs above its cores. `ending` are the ids of jobs that will have ended. */
export function paintNode(canvas, node, jobs, width, ending) {
  const cores = new Map(), gpus = new Map(), ratio = devicePixelRatio || 1, height = heightOf(node, width);
  for (const job of jobs) {
    for (const core of job.cores) cores.set(core, job.id);
    for (const [uuid, milli] of job.gpus) gpus.set(uuid, [...(gpus.get(uuid) || []), [job.id, milli]]);
  }
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)], ctx = canvas.getContext("2d");
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; canvas.style.height = `${height}px`; }
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  let y = 1;
  node.numa.forEach((part, number) => {
    if (number) { ctx.fillStyle = css("--line"); ctx.fillRect(0, y + 2, width, 1); y += PART; }
    const wide = perRow(width, GPU), narrow = perRow(width, CELL);
    part.gpus.forEach((gpu, index) => {
      const x = 1 + (index % wide) * (GPU + GAP), top = y + Math.floor(index / wide) * (GPU + GAP), shares = gpus.get(gpu.uuid) || [];
      const whole = shares.length === 1 && shares[0][1] >= 500 ? look(shares[0][0]) : null;
      cell(ctx, x, top, GPU, GPU, null);
      let from = 0;
      for (const [id, milli] of shares) {
        const share = Math.round((GPU * milli) / 1000);
        cell(ctx, x, top + GPU - from - share, GPU, share, look(id), whole && share === GPU && !gpu.ill ? whole.label : "", ending.has(id));
        from += share;
      }
      if (gpu.ill) { ctx.strokeStyle = css("--red"); ctx.lineWidth = 2; ctx.strokeRect(x + 1, top + 1, GPU - 2, GPU - 2); }
      if (gpu.ill || (whole && from < GPU)) {
        ctx.save();
        ctx.translate(x, top);
        write(ctx, GPU, GPU, from && !ending.has(shares[0][0]) ? whole : null, gpu.ill ? "✕" : whole.label);
        ctx.restore();
      }
    });
    y += Math.ceil(part.gpus.length / wide) * (GPU + GAP);
    part.cores.forEach((core, index) => {
      const id = cores.get(core);
      cell(ctx, 1 + (index % narrow) * (CELL + GAP), y + Math.floor(index / narrow) * (CELL + GAP), CELL, CELL, id ? look(id) : null, id ? look(id).label : "", id !== undefined && ending.has(id));
    });
    y += Math.ceil(part.cores.length / narrow) * (CELL + GAP);
  });
}
