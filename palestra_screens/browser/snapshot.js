// Runs in each page before its own scripts. Notes which elements listen for clicks, describes the page as lines of text
// with a number for each element that can be acted on, and finds the points at which these can be clicked.
(() => {
  if (window.__palestra) return;
  const listening = new WeakSet();
  const add = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (kind, ...rest) {
    if (["click", "mousedown", "mouseup", "dblclick"].includes(kind) && this instanceof Element) listening.add(this);
    return add.call(this, kind, ...rest);
  };

  const SILENT = new Set(["SCRIPT", "STYLE", "NOSCRIPT", "TEMPLATE", "HEAD", "BR", "HR"]);
  const SHAPES = new Set(["rect", "circle", "ellipse", "polygon", "polyline", "path", "line"]);
  const EIGHTHS = [4, 2, 6, 1, 7]; // of an element's size, the middle first
  const POINTS = EIGHTHS.flatMap((down) => EIGHTHS.map((across) => [across, down]));
  // The page may replace what it finds, but not what is taken before its own scripts run.
  const slice = Function.prototype.call.bind(String.prototype.slice);
  const wellFormed = Function.prototype.call.bind(String.prototype.toWellFormed);
  const later = window.setTimeout.bind(window);
  const now = performance.now.bind(performance);
  const Picture = window.Image;
  const ofStyles = new Map(); // pictures that style sheets put in the place of elements, by their addresses
  const words = (text) => (text || "").replace(/\s+/g, " ").trim();
  const shown = (element) => element.checkVisibility({ checkVisibilityCSS: true });

  function acts(element) {
    if (element === document.body || element === document.documentElement) return false;
    return (
      listening.has(element) ||
      ["onclick", "onmousedown", "ondblclick"].some((name) => element[name]) ||
      element.hasAttribute("tabindex") ||
      element.isContentEditable ||
      ["button", "link", "tab", "menuitem", "option", "checkbox", "radio", "switch"].includes(element.getAttribute("role")) ||
      getComputedStyle(element).cursor === "pointer"
    );
  }

  function control(element) {
    const tag = element.tagName.toLowerCase();
    const name = words(element.getAttribute("aria-label") || element.getAttribute("placeholder") || element.title);
    if (tag === "button") return `button ${words(element.innerText) || name}`;
    if (tag === "a") return `link ${words(element.innerText) || name}`;
    if (tag === "textarea") return `textbox ${name} ${JSON.stringify(element.value)}`;
    if (tag === "select") {
      const options = [...element.options].map((one) => (one.selected ? "*" : "") + words(one.text));
      return `${element.multiple ? "list" : "choice"} ${name} ${options.join(" | ")}`;
    }
    if (tag === "img") return `image ${words(element.alt) || name}`;
    if (tag !== "input") return null;
    const kind = element.type;
    if (kind === "checkbox" || kind === "radio") {
      return `${kind} ${words(element.labels?.[0]?.innerText) || name}${element.checked ? " (checked)" : ""}`;
    }
    if (["submit", "button", "reset", "image"].includes(kind)) return `button ${element.value || name}`;
    const value = kind === "password" ? "*".repeat(element.value.length) : element.value;
    return `${kind === "text" ? "textbox" : kind} ${name} ${JSON.stringify(value)}`;
  }

  function mark(element) {
    const classes = [...element.classList].slice(0, 3).map((name) => `.${name}`).join("");
    return element.tagName.toLowerCase() + (element.id ? `#${element.id}` : "") + classes;
  }

  let elements = [];

  // Returns the beginning of the description and its whole length: a page can be longer than its reader's memory.
  function snapshot([leaveOut, most]) {
    const lines = [];
    elements = [];
    const numbered = (element, text) => {
      elements.push(element);
      lines.push(`[${elements.length}] ${words(text)}${element.disabled ? " (disabled)" : ""}`);
    };
    const walk = (element, active, named) => {
      if (SILENT.has(element.tagName) || (leaveOut && element.matches(leaveOut)) || !shown(element)) return;
      const described = control(element);
      if (described !== null) return numbered(element, described);
      if (SHAPES.has(element.tagName)) {
        const box = element.getBoundingClientRect();
        const fill = element.getAttribute("fill") || element.style.fill;
        const at = `at ${Math.round(box.x)},${Math.round(box.y)} size ${Math.round(box.width)}x${Math.round(box.height)}`;
        return numbered(element, `${element.tagName} ${fill} ${at}`);
      }
      const here = active || acts(element);
      // The text of a label is the name of its control, which has a line of its own.
      const label = named || (element.tagName === "LABEL" && ["checkbox", "radio"].includes(element.control?.type));
      const before = lines.length;
      for (const child of element.childNodes) {
        if (child.nodeType === Node.TEXT_NODE && !label) {
          const text = words(child.textContent);
          if (text && here) numbered(element, text);
          else if (text) lines.push(text);
        } else if (child.nodeType === Node.ELEMENT_NODE) walk(child, here, label);
      }
      if (element.shadowRoot) for (const child of element.shadowRoot.children) walk(child, here, label);
      const box = element.getBoundingClientRect();
      if (lines.length === before && box.width * box.height && acts(element)) numbered(element, mark(element));
    };
    if (document.body) walk(document.body, false, false);
    const text = `${lines.join("\n")}`;
    return [wellFormed(slice(text, 0, most)), text.length]; // a cut may part a pair of surrogates
  }

  // A point of the element that is not covered by another one, so that buttons that overlap can each be clicked.
  function point(element) {
    if (!element?.isConnected || !shown(element)) return null;
    element.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    for (const box of element.getClientRects()) {
      for (const [across, down] of POINTS) {
        const x = box.x + (box.width * across) / 8;
        const y = box.y + (box.height * down) / 8;
        let hit = document.elementFromPoint(x, y);
        while (hit?.shadowRoot?.elementFromPoint(x, y) && hit.shadowRoot.elementFromPoint(x, y) !== hit) {
          hit = hit.shadowRoot.elementFromPoint(x, y);
        }
        if (hit && element.contains(hit)) return [x, y];
      }
    }
    return null;
  }

  // Whether the page is about to look different by itself: a picture that is not there yet has no size, and what opens
  // or closes is on its way. A game may have an animation of its own that never ends.
  function moves() {
    for (const element of document.body?.querySelectorAll("*") ?? []) {
      const address = /^url\("(.*)"\)/.exec(getComputedStyle(element).content)?.[1];
      if (address && !ofStyles.has(address)) ofStyles.set(address, Object.assign(new Picture(), { src: address }));
    }
    if ([...ofStyles.values(), ...document.images].some((one) => !one.complete && one.loading !== "lazy")) return true;
    if (window.jQuery?.timers?.length > 0) return true;
    const ends = (animation) => animation.effect?.getComputedTiming().endTime < Infinity;
    return document.getAnimations().some((animation) => animation.playState === "running" && ends(animation));
  }

  async function settle(most) {
    const until = now() + most;
    while (moves() && now() < until) await new Promise((resolve) => later(resolve, 10));
  }

  function scroll(element, down) {
    const target = element || document.scrollingElement;
    target.scrollBy({ top: (down ? 0.8 : -0.8) * (element ? element.clientHeight : innerHeight), behavior: "instant" });
  }

  const empty = (element) => element.select?.();
  const offered = Object.freeze({ snapshot, settle, point, scroll, empty, get elements() { return elements; } });
  Object.defineProperty(window, "__palestra", { value: offered }); // neither written nor replaced by the page
})();
