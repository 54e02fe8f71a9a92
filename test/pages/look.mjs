// SPDX-License-Identifier: Apache-2.0
// Opens pages in Chromium at a desktop's and a phone's size and prints what each shows, as JSON.
// node look.mjs FOLDER_OF_NODE_MODULES FOLDER_FOR_SCREENSHOTS PAGE_OR_URL…
import { createRequire } from "node:module";
import { basename, dirname, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, out, ...pages] = process.argv.slice(2);
const require = createRequire(join(resolve(modules), "look.js"));
const [chromium, puppeteer] = ["@sparticuz/chromium", "puppeteer-core"].map((name) => require(name).default ?? require(name));
const SIZES = { desktop: { width: 1280, height: 800 }, phone: { width: 390, height: 844, isMobile: true, hasTouch: true } };

// Runs in the page.
const measure = (width) => {
  const shown = (selector) => {
    const box = document.querySelector(selector)?.getBoundingClientRect();
    return box !== undefined && box.height > 0 && box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth;
  };
  return {
    too_wide: Math.max(document.documentElement.scrollWidth, innerWidth) - width,
    answer: document.querySelector(".answer .sentence")?.textContent ?? "",
    number: document.querySelector(".answer .figure")?.textContent ?? "",
    first_screen: shown(".answer .sentence") && shown(".answer .figure"),
    plots: document.querySelectorAll(".plot, .results-plot").length,
    drawn: document.querySelectorAll(":is(.plot, .results-plot):has(svg.main-svg)").length,
    films: [...document.querySelectorAll("video")].map((film) => film.videoWidth),
    plots_beside_films: document.querySelectorAll(".film .plot").length,
    slider: document.querySelector("#slider")?.value,
    film_s: document.querySelector("video")?.currentTime,
  };
};

const browser = await puppeteer.launch({
  args: chromium.args,
  executablePath: await chromium.executablePath(),
  headless: "shell",
});
const found = [];
for (const path of pages) {
  for (const [size, viewport] of Object.entries(SIZES)) {
    const page = await browser.newPage();
    const errors = [];
    page.on("console", (message) => ["error", "warn"].includes(message.type()) && errors.push(message.text()));
    page.on("pageerror", (error) => errors.push(String(error)));
    page.on("requestfailed", (request) => errors.push(`${request.url().slice(0, 80)}: ${request.failure()?.errorText}`));
    await page.setViewport(viewport);
    await page.goto(path.startsWith("http:") ? path : pathToFileURL(resolve(path)), { waitUntil: "load" });
    await page.waitForFunction(() => [...document.querySelectorAll("video")].every((film) => film.readyState >= 2 || film.error));
    const before = await page.evaluate(measure, viewport.width);
    const name = `${basename(dirname(path))}-${basename(path, ".html")}-${size}`.replace("-report-", "-");
    await page.screenshot({ path: join(out, `${name}.png`) });
    for (let step = 0; step < 3; step++) await page.keyboard.press("ArrowRight");
    await new Promise((done) => setTimeout(done, 200));
    const { slider, film_s } = await page.evaluate(measure, viewport.width);
    await page.screenshot({ path: join(out, `${name}-whole.png`), fullPage: true });
    found.push({ page: path, size, errors, ...before, slider, film_s });
    await page.close();
  }
}
await browser.close();
console.log(JSON.stringify(found));
