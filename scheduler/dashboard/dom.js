// Building and changing elements. Text always goes in as text, never as markup: names and reasons
// come from agents and prompts.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "circle", "line", "rect", "text", "title", "polyline"]);

export function h(name, attributes = {}, ...children) {
  const element = name === "title" || DRAWN.has(name)
    ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((each) => each !== null && each !== undefined));
  return element;
}

// What was said is remembered, as reading it back from a thousand cells takes its time; who sets the
// text of an element does it only here.
export function setText(element, text) {
  if (element.said === text) return;
  element.said = text;
  element.textContent = text;
}

// The children of `parent` become one element per entry of `entries`, kept by key, so that focus,
// selection and scroll position outlive an update.
export function keyed(parent, entries, keyOf, make, update) {
  const old = parent.kept ?? (parent.kept = new Map());
  const now = new Map();
  const wanted = new Set(entries.map(keyOf));
  for (const [key, element] of old) if (!wanted.has(key)) element.remove();
  let place = parent.firstElementChild;
  for (const entry of entries) {
    const key = keyOf(entry);
    const element = old.get(key) ?? make(entry);
    now.set(key, element);
    update(element, entry);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  parent.kept = now;
}

// Rows that are out of sight are brought up to date by turns, one in so many at each update.
const TURNS = 5;

// A table whose cells change in place. A column: {title, text(row), number, mark(row) -> class,
// node(row) -> element or null, sort(row)}. What layout costs is the cells that change: rows in
// sight, or less than half a screen from it, change at once, others when they come there or by turns.
export class Table {
  constructor(columns, keyOf, { caption, sortable = true } = {}) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.by = null;
    this.down = false;
    this.rows = [];
    this.updates = 0;
    this.near = new WeakSet();
    this.watch = new IntersectionObserver((seen) => {
      for (const { target, isIntersecting } of seen) {
        if (isIntersecting) {
          this.near.add(target);
          this.fill(target, target.row);
        } else this.near.delete(target);
      }
    }, { rootMargin: "50%" });
    this.body = h("tbody");
    this.heads = columns.map((column, index) => h(
      "th", { scope: "col", class: column.number ? "number" : null, "aria-sort": "none" },
      sortable ? h("button", { type: "button", onclick: () => this.sortBy(index) }, column.title)
        : column.title));
    this.element = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      h("table", {}, h("thead", {}, h("tr", {}, ...this.heads)), this.body));
  }

  sortBy(index) {
    this.down = this.by === index ? !this.down : Boolean(this.columns[index].number);
    this.by = index;
    this.heads.forEach((head, at) => head.setAttribute(
      "aria-sort", at === index ? (this.down ? "descending" : "ascending") : "none"));
    this.show(this.rows);
  }

  show(rows) {
    this.rows = rows;
    let shown = rows;
    if (this.by !== null) {
      const column = this.columns[this.by];
      const value = column.sort ?? column.text;
      const way = this.down ? -1 : 1;
      shown = [...rows].sort((a, b) => {
        const x = value(a), y = value(b);
        return (x < y ? -1 : x > y ? 1 : 0) * way;
      });
    }
    let turn = this.updates++;
    keyed(this.body, shown, this.keyOf, () => this.make(), (tr, row) => {
      const made = !tr.row;
      tr.row = row;
      if (made || this.near.has(tr) || turn++ % TURNS === 0) this.fill(tr, row);
    });
  }

  make() {
    const tr = h("tr", {}, this.columns.map((column, index) => index === 0
      ? h("th", { scope: "row" }) : h("td", { class: column.number ? "number" : null })));
    this.watch.observe(tr);
    return tr;
  }

  fill(tr, row) {
    this.columns.forEach((column, index) => {
      const cell = tr.children[index];
      if (column.node) {
        const sign = column.sign ? column.sign(row) : column.text(row);
        if (cell.sign === sign) return;
        cell.sign = sign;
        cell.replaceChildren(column.node(row));
        return;
      }
      setText(cell, column.text(row));
      if (!column.mark) return;
      const marked = `${column.number ? "number " : ""}${column.mark(row)}`;
      if (cell.className !== marked) cell.className = marked;
    });
  }
}

export function card(title, ...children) {
  return h("section", { class: "card", "aria-label": title }, h("h2", {}, title), ...children);
}
